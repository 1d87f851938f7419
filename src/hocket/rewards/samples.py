"""Read samples, which are rows with a completion, as rollouts: of a file (reward-test) or a request (serve-reward)."""

from collections.abc import Iterable, Mapping
from typing import Any

from hocket.types import Prompt, Rollout, TokenSequence


def rollout_of(id: str, row: Mapping[str, Any], prompt: str = "prompt", answer: str | None = "answer") -> Rollout:
    """Return the rollout of a row; `prompt` and `answer` name its columns. Raise ValueError if it is no sample."""
    said, messages = row.get(prompt), row.get("messages")
    if isinstance(said, list):
        said, messages = None, said
    if not isinstance(completion := row.get("completion"), str):
        raise ValueError(f"the column 'completion' must be a text, got {completion!r:.80}")
    used = (prompt, answer, "messages", "completion")
    token_ids = tuple(row.get("token_ids", ()))
    try:
        asked = Prompt(
            id=id,
            token_ids=(0,),
            messages=None if messages is None else tuple(messages),
            text=said or next((m["content"] for m in reversed(messages or ()) if m["role"] == "user"), ""),
            answer=None if (told := row.get(answer or "")) is None else str(told),
            meta=row.get("meta", {key: value for key, value in row.items() if key not in used}),
        )
        sequence = TokenSequence(
            token_ids=token_ids,
            mask=tuple(map(bool, row.get("mask", [True] * len(token_ids)))),
            logprobs=(0.0,) * len(token_ids),
            finish_reason=row.get("finish_reason", "stop"),
            opening=row.get("opening", ""),
            text=completion,
        )
    except (TypeError, KeyError) as error:
        raise ValueError(repr(error)) from error
    return Rollout(id=id, prompt=asked, sequences=(sequence,), reward=row.get("reward"))


def by_prompt(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """Return groups: the rollouts of the same prompt and answer."""
    groups: dict[str, list[Rollout]] = {}
    for one in rollouts:
        groups.setdefault(repr((one.prompt.text, one.prompt.messages, one.prompt.answer)), []).append(one)
    return list(groups.values())
