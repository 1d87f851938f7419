"""Reads the samples that guards.keep_batch wrote."""

import json
from pathlib import Path

from hocket.trainer.guards import NUMBERS
from hocket.types import TokenSequence, TrainSample


def read_batch(path: Path) -> list[TrainSample]:
    return [
        TrainSample(
            id=row["id"],
            sequence=TokenSequence(
                token_ids=tuple(row["token_ids"]),
                mask=tuple(map(bool, row["mask"])),
                logprobs=tuple(row["rollout_logprobs"]),
                version_min=row["version_min"],
            ),
            **{name: tuple(row[name]) for name in NUMBERS},
        )
        for row in json.loads(path.read_text(encoding="utf-8"))["samples"]
    ]
