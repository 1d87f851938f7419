"""Prompts: read, checked and rendered once, drawn as a curriculum orders, each draw tracked."""

from hocket.data.curriculum import Candidates, Curriculum, EpochPlan, curriculum

__all__ = ["Candidates", "Curriculum", "EpochPlan", "curriculum"]
