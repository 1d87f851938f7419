"""The parts of a run that ship."""

from pathlib import Path

import pytest
from tests.test_run_part import joined

from hocket.run_part import RUN_PARTS, RunPart


def test_settings_decide_which_parts_join(tmp_path: Path) -> None:
    with joined(tmp_path) as parts:
        assert [type(part).__name__ for part in parts] == ["SamplingCheck", "Timeline", "TokenFiles"]
    with joined(tmp_path, "sync.check_share=0") as parts:
        assert type(parts[0]).__name__ == "Verification"
    every = ("checkpoint.best=eval/greedy", "eval.data.source=task:sort", f"checkpoint.copy_to={tmp_path}/copies")
    with joined(tmp_path, *every) as parts:
        assert [type(part).__name__ for part in parts] == ["SamplingCheck", "Timeline", "TokenFiles", "Best", "CopyTo"]


@pytest.mark.parametrize("name", sorted(RUN_PARTS.names))
def test_every_part_that_ships_is_a_run_part(name: str) -> None:
    module = __import__(RUN_PARTS._modules[name], fromlist=["*"])
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, RunPart)]
    assert [kind for kind in kinds if kind is not RunPart]
