"""A delta changes a copy of what a server holds."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.server.test_versions import NAME

from hocket.extras.delta import codec as delta
from hocket.extras.delta.load import PatchedCopy
from hocket.protocol import DiskSource, manifest
from hocket.server.errors import ApiError
from hocket.server.state import Held
from support import fakes
from support.engines import make_model, publish


def publish_delta(root: Path) -> Held:
    """Publishes v1 in full, which it returns as held, and v2 as what changed in one tensor."""
    model = make_model(tied=False, seed=1)
    checksum = publish(model, root / "v1", 1)
    old = load_file(root / "v1" / "model.safetensors")
    new = old | {NAME: old[NAME] + torch.eye(*old[NAME].shape)}
    folder = root / "v2"
    folder.mkdir()
    delta.save({NAME: delta.encode(old[NAME], new[NAME])}, folder, checksum)
    manifest.write(folder, 2, manifest.specs(new.items()))
    return Held(DiskSource(name="v1"), fakes.reloaded(1, checksum))


def test_a_delta_changes_a_copy_and_a_full_disk_leaves_none(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, described = publish_delta(root), fakes.manifest_of(root / "v2")
    before = (root / "v1" / "model.safetensors").read_bytes()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    copy = PatchedCopy(root)

    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr("shutil.copyfile", full)
        with pytest.raises(ApiError, match=r"can't be applied: OSError: .*No space left") as caught:
            copy.patched(root / "v2", described, held)
    assert caught.value.status == 409
    assert list((tmp_path / "temporary").iterdir()) == []
    for now in (held, None):  # once more, as after a load that failed
        folder = copy.patched(root / "v2", described, now)
        assert manifest.specs(manifest.tensors(folder)) == described.tensors
    assert (root / "v1" / "model.safetensors").read_bytes() == before
    copy.discard()
    assert not folder.exists()


def test_a_server_without_the_base_or_its_files_says_so(root: Path) -> None:
    held, described = publish_delta(root), fakes.manifest_of(root / "v2")
    copy = PatchedCopy(root)
    other = held._replace(answer=fakes.reloaded(1, "0" * 32))
    for holds, code in (
        (None, "no_base"),
        (other, "no_base"),
        (held._replace(source=None), "no_base"),
        (held._replace(source=DiskSource(name="pruned")), "no_such_version"),
    ):
        with pytest.raises(ApiError) as caught:
            copy.patched(root / "v2", described, holds)
        assert caught.value.body.code == code
