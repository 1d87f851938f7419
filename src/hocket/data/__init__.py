"""Rows of a data source as prompts, each checked and rendered once; the order they are played in, and their ledger."""

from hocket.data.curriculum import Candidates, Curriculum, Plan, curriculum
from hocket.data.loading import load_demonstrations, load_prompts
from hocket.data.rendering import Renderer
from hocket.data.stream import PromptStream

__all__ = [
    "Candidates",
    "Curriculum",
    "Plan",
    "PromptStream",
    "Renderer",
    "curriculum",
    "load_demonstrations",
    "load_prompts",
]
