"""Which published folders are found and believed, without an engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hocket import manifest
from hocket.server import versions
from hocket.server.errors import ApiError


@pytest.fixture(scope="module")
def shapes(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, versions.ModelShapes]:
    found = {}
    for tied in (True, False):
        folder = tmp_path_factory.mktemp("shapes")
        kit.make_model(tied=tied, seed=0).config.save_pretrained(folder)
        found[tied] = versions.model_shapes(str(folder))
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path.resolve()


def test_shapes_are_those_of_the_model_and_the_tied_head_may_be_left_out(shapes: Any) -> None:
    # Two layers of 7 matrices, 3 biases and 2 norms; embedding, last norm and head.
    assert len(shapes[True].shapes) == len(shapes[False].shapes) == 2 * 12 + 3
    assert shapes[True].shapes["model.embed_tokens.weight"] == (96, 64)
    assert shapes[True].shapes["model.layers.1.self_attn.k_proj.weight"] == (32, 64)
    assert shapes[True].tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert shapes[False].tied == {}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_good_version_is_verified_in_any_float_type(
    kit: Any, root: Path, shapes: Any, tied: bool, dtype: str
) -> None:
    checksum = kit.publish(kit.make_model(tied=tied, seed=1), root / "a" / "v1", 1, dtype=dtype)
    assert versions.verify(versions.find(root, "a/v1"), 1, shapes[tied]).checksum == checksum


def test_a_tied_head_may_be_absent_but_an_untied_one_may_not(kit: Any, root: Path, shapes: Any) -> None:
    kit.publish(kit.make_model(tied=True, seed=1), root / "tied", 1, drop=["lm_head.weight"])
    versions.verify(root / "tied", 1, shapes[True])
    kit.publish(kit.make_model(tied=False, seed=1), root / "untied", 1, drop=["lm_head.weight"])
    with pytest.raises(ApiError, match=r"'lm_head\.weight' is missing"):
        versions.verify(root / "untied", 1, shapes[False])


def test_a_tied_head_that_differs_from_its_embedding_is_refused(kit: Any, root: Path, shapes: Any) -> None:
    kit.publish(kit.make_model(tied=False, seed=1), root / "v1", 1)
    with pytest.raises(ApiError, match=r"ties 'lm_head\.weight' to 'model\.embed_tokens\.weight'"):
        versions.verify(root / "v1", 1, shapes[True])


@pytest.mark.parametrize(
    "name",
    ["../v1", "/etc", "a/../v1", "a//v1", "", ".", "./v1", "v1/", ".v1.partial", "a/.v1.partial", "a\\v1", "v1\0"],
)
def test_names_that_are_paths_or_hidden_are_refused(root: Path, name: str) -> None:
    (root / ".v1.partial").mkdir()
    (root / ".v1.partial" / manifest.COMPLETE_FILE).touch()
    with pytest.raises(ApiError) as caught:
        versions.find(root, name)
    assert caught.value.status == 422


def test_a_link_that_leads_out_of_the_root_is_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / manifest.COMPLETE_FILE).touch()
    (root / "v1").symlink_to(outside)
    with pytest.raises(ApiError, match="leads out of the root"):
        versions.find(root.resolve(), "v1")


def test_unknown_and_unfinished_versions_are_refused(root: Path) -> None:
    with pytest.raises(ApiError) as caught:
        versions.find(root, "v7")
    assert caught.value.status == 404
    (root / "v8").mkdir()
    with pytest.raises(ApiError, match="no COMPLETE marker") as caught:
        versions.find(root, "v8")
    assert caught.value.status == 409


def change_tensors(folder: Path, change: Any, *, describe: bool) -> None:
    """Changes the stored tensors, and the manifest with them or not."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    if describe:
        built = manifest.build(1, tensors.items())
        (folder / manifest.MANIFEST_FILE).write_text(built.model_dump_json())


NAME = "model.layers.0.mlp.down_proj.weight"


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


def edit_manifest(folder: Path, **fields: Any) -> None:
    path = folder / manifest.MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def claim_another_tensor(folder: Path) -> None:
    tensors = json.loads((folder / manifest.MANIFEST_FILE).read_text())["tensors"]
    tensors[NAME]["checksum"] = "0" * 16
    edit_manifest(folder, tensors=tensors)


BAD = {
    "truncated file": (truncate, "can't read the safetensors files"),
    "flipped bit": (flip_a_bit, "are not the ones that were published"),
    "no files": (lambda f: (f / "model.safetensors").unlink(), "is missing in the files"),
    "not safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "can't read the safetensors files"),
    "file lacks a tensor": (
        lambda f: change_tensors(f, lambda t: t.pop(NAME), describe=False),
        "is missing in the files",
    ),
    "file has one more": (
        lambda f: change_tensors(f, lambda t: t.update(extra=torch.zeros(2)), describe=False),
        "hold tensor 'extra', which the manifest does not have",
    ),
    "tensor missing everywhere": (
        lambda f: change_tensors(f, lambda t: t.pop(NAME), describe=True),
        "is missing",
    ),
    "unknown tensor everywhere": (
        lambda f: change_tensors(f, lambda t: t.update(extra=torch.zeros(2)), describe=True),
        "the model has no tensor 'extra'",
    ),
    "wrong shape": (
        lambda f: change_tensors(f, lambda t: t.update({NAME: torch.zeros(3, 3)}), describe=True),
        r"has shape \[3, 3\], the model's is \[64, 128\]",
    ),
    "transposed": (
        lambda f: change_tensors(f, lambda t: t.update({NAME: t[NAME].T.contiguous()}), describe=True),
        r"has shape \[128, 64\], the model's is \[64, 128\]",
    ),
    "integers": (
        lambda f: change_tensors(f, lambda t: t.update({NAME: t[NAME].int()}), describe=True),
        "is int32; weights are float32",
    ),
    "other type than described": (
        lambda f: change_tensors(f, lambda t: t.update({NAME: t[NAME].half()}), describe=False),
        "is float16 .* in the file, float32 .* in the manifest",
    ),
    "no manifest": (lambda f: (f / manifest.MANIFEST_FILE).unlink(), "can't read manifest.json"),
    "manifest is no json": (lambda f: (f / manifest.MANIFEST_FILE).write_text("{"), "can't read manifest.json"),
    "manifest of another version": (lambda f: edit_manifest(f, version=2), "is of version 2, not 1"),
    "manifest with a wrong sum": (lambda f: edit_manifest(f, checksum="0" * 32), "is not the one of its tensors"),
    "manifest with a wrong tensor sum": (claim_another_tensor, "is not the one of its tensors"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_version_is_refused_with_the_reason(kit: Any, root: Path, shapes: Any, kind: str) -> None:
    spoil, said = BAD[kind]
    kit.publish(kit.make_model(tied=False, seed=1), root / "v1", 1)
    spoil(root / "v1")
    with pytest.raises(ApiError, match=said) as caught:
        versions.verify(root / "v1", 1, shapes[False])
    assert (caught.value.status, caught.value.body.code) == (409, "bad_version")
