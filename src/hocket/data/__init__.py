"""Rows of a data source as prompts, each checked and rendered once; the order they are played in, and their ledger."""

from hocket.data.curriculum import Curriculum, Plan, Pool, curriculum
from hocket.data.loading import Prompts, load_demonstrations, load_prompts
from hocket.data.rendering import Renderer
from hocket.data.stream import EXHAUSTED, Draw, PromptStream

__all__ = [
    "EXHAUSTED",
    "Curriculum",
    "Draw",
    "Plan",
    "Pool",
    "PromptStream",
    "Prompts",
    "Renderer",
    "curriculum",
    "load_demonstrations",
    "load_prompts",
]
