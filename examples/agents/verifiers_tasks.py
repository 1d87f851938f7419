"""Environments of the package verifiers, written for nothing else: letters are sorted, a number is guessed by hints."""

import random
import string

import verifiers as vf
from datasets import Dataset


def load_environment(task: str = "sort", rows: int = 2048) -> vf.Environment:
    """Return the environment of a task: sort (one turn) or guess (several)."""
    return {"sort": sort, "guess": guess}[task](rows)


def sort(rows: int) -> vf.Environment:
    """Return letters to sort; each in its place counts."""

    def data(seed: int) -> Dataset:
        rng = random.Random(seed)
        words = [rng.sample(string.ascii_lowercase, rng.randint(4, 6)) for _ in range(rows)]
        questions = [f"Sort: {''.join(word)}" for word in words]
        return Dataset.from_dict({"question": questions, "answer": ["".join(sorted(word))[::-1] for word in words]})

    def in_place(completion: list, answer: str) -> float:
        said = completion[-1]["content"]
        return sum(a == b for a, b in zip(said, answer, strict=False)) / max(len(said), len(answer))

    return vf.SingleTurnEnv(dataset=data(0), eval_dataset=data(1), rubric=vf.Rubric(funcs=[in_place]))


class Guess(vf.MultiTurnEnv):
    """Tells whether the number is higher or lower."""

    async def env_response(self, messages: list, state: dict, **_: object) -> list:
        said = messages[-1]["content"]
        if not said.isdecimal() or said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "over"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if int(said) < int(state["answer"]) else "lower"}]


def guess(rows: int) -> vf.Environment:
    """Return numbers from 1 to 20 to guess; a near last guess counts, too."""
    rng = random.Random(0)
    questions = ["Guess: 1 to 20"] * rows
    data = Dataset.from_dict({"question": questions, "answer": [str(rng.randint(1, 20)) for _ in questions]})

    def near(completion: list, answer: str) -> float:
        said = [message["content"] for message in completion if message["role"] == "assistant"][-1]
        return max(0.0, 1 - abs(int(said) - int(answer)) / 10) if said.isdecimal() else 0.0

    return Guess(dataset=data, rubric=vf.Rubric(funcs=[near]), max_turns=3)
