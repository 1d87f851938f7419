"""Rows of a data source as prompts, each checked before a model is loaded and rendered to token ids exactly once."""

from hocket.data.loading import Prompts, load_demonstrations, load_prompts
from hocket.data.rendering import Renderer
from hocket.data.stream import Draw, PromptStream

__all__ = ["Draw", "PromptStream", "Prompts", "Renderer", "load_demonstrations", "load_prompts"]
