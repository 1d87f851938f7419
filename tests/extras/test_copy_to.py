import errno
from pathlib import Path

import pytest

from hocket.extras import copy_to as second_tier
from hocket.extras.copy_to import copy_to
from hocket.protocol.manifest import COMPLETE_FILE


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"step_{step:06d}"
    path.mkdir(parents=True)
    (path / "tensors").write_bytes(bytes(range(256)) * step)
    (path / COMPLETE_FILE).touch()
    return path


def test_checkpoints_are_copied_as_they_are_and_the_newest_stay(tmp_path: Path) -> None:
    said: list[str] = []
    for step in (5, 10, 15):
        copy_to(tmp_path / "away", 2, said.append, checkpoint(tmp_path / "here", step))
    assert said == []
    assert sorted(path.name for path in (tmp_path / "away").iterdir()) == ["step_000010", "step_000015"]
    for name in ("step_000010", "step_000015"):
        here, away = tmp_path / "here" / name, tmp_path / "away" / name
        assert (here / "tensors").read_bytes() == (away / "tensors").read_bytes()
        assert (away / COMPLETE_FILE).exists()


def test_a_copy_that_is_not_what_was_sent_or_a_full_disk_leaves_nothing_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    here = checkpoint(tmp_path / "here", 5)

    def half(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:-1] if source.stat().st_size else b"")

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for fault, why in ((half, "tensors did not arrive as it was"), (full, "No space left on device")):
        with monkeypatch.context() as patch:
            patch.setattr(second_tier.shutil, "copyfile", fault)
            copy_to(tmp_path / "away", 2, said.append, here)
        assert said[-1].startswith(f"WARNING: {here} was not copied to {tmp_path / 'away'}")
        assert why in said[-1]
        assert list((tmp_path / "away").iterdir()) == []


def test_a_folder_that_can_not_be_written_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "away").touch()  # no folder
    copy_to(tmp_path / "away", 2, said.append, checkpoint(tmp_path / "here", 5))
    assert said[0].startswith(f"WARNING: {tmp_path / 'here' / 'step_000005'} was not copied to {tmp_path / 'away'}")
