"""Prompts: read, checked and rendered once, drawn in the order of a curriculum, and accounted for in a ledger."""

from hocket.data.curriculum import Candidates, Curriculum, EpochPlan, curriculum
from hocket.data.prompts import Renderer, load_demonstrations, load_prompts
from hocket.data.stream import PromptStream

__all__ = [
    "Candidates",
    "Curriculum",
    "EpochPlan",
    "PromptStream",
    "Renderer",
    "curriculum",
    "load_demonstrations",
    "load_prompts",
]
