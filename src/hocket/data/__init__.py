"""Prompts: read, checked and rendered once, drawn in the order of a curriculum, and accounted for in a ledger."""

from hocket.data.curriculum import Candidates, Curriculum, EpochPlan, curriculum

__all__ = ["Candidates", "Curriculum", "EpochPlan", "curriculum"]
