"""Which published folders are found and believed, without an engine."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hocket.protocol import AdapterConfig, TensorLayout, manifest
from hocket.server import versions
from hocket.server.errors import ApiError
from support.engines import MODEL_SIZES, make_model, publish


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, manifest.ModelShapes]:
    found = {}
    for tied in (True, False):
        folder = tmp_path_factory.mktemp("shapes")
        make_model(tied=tied, seed=0).save_pretrained(folder)
        found[tied] = manifest.model_shapes(str(folder))
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path.resolve()


def verify(folder: Path, version: int, expected: manifest.ModelShapes) -> str:
    """Checks the folder by its own manifest, and returns the checksum."""
    described = versions.read(folder.parent, folder.name)[1]
    versions.check_manifest(described, version, expected)
    versions.check_headers(folder, described)
    return described.checksum


def saved(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in manifest.tensors(folder)}


def complete(folder: Path, version: int) -> str:
    """Makes a published version of a saved model."""
    return manifest.write(folder, version, manifest.specs(manifest.tensors(folder)))


@pytest.mark.parametrize(
    ("kind", "more", "max_shard_size"),
    [
        ("Qwen3Moe", {"moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2}, "50KB"),
        ("Mixtral", {"num_local_experts": 4}, "1GB"),
        ("Llama", {"tie_word_embeddings": True}, "50KB"),
        ("Llama", {"tie_word_embeddings": False}, "1GB"),
    ],
)
def test_names_are_those_that_saving_writes(
    root: Path, kind: str, more: dict[str, Any], max_shard_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{kind}-{max_shard_size}"
    folder = root / f"models--a--{name}" / "snapshots" / ("0" * 40)  # in the cache of the hub
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**MODEL_SIZES, **more))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (max_shard_size == "50KB")
    found = manifest.model_shapes(str(folder))
    assert {key: shape for key, shape in found.shapes.items() if key not in found.tied} == saved(folder)
    assert found.architecture.startswith(f"{kind}ForCausalLM ")
    assert found._replace(shapes={**found.shapes, "model.norm.weight": (1,)}).architecture != found.architecture
    tied = more.get("tie_word_embeddings")
    assert found.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    model.save_pretrained(root / "v1")
    checksum = complete(root / "v1", 1)
    assert verify(versions.find(root, "v1"), 1, found) == checksum
    (root / f"models--a--{name}" / "refs").mkdir()
    (root / f"models--a--{name}" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert manifest.model_shapes(f"a/{name}") == found


def test_a_checkpoint_without_its_head_and_with_old_buffers_is_what_the_trainer_makes_of_it(root: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=64, eos_token_id=1, bos_token_id=1
    )
    transformers.AutoModel.from_config(config).save_pretrained(root / "model")
    path = root / "model" / "model.safetensors"
    old = {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.0.rotary_emb.inv_freq": torch.ones(8)}
    save_file(load_file(path) | old, path, metadata={"format": "pt"})
    transformers.AutoModelForCausalLM.from_pretrained(root / "model").save_pretrained(root / "v1")
    found = manifest.model_shapes(str(root / "model"))
    assert {key: shape for key, shape in found.shapes.items() if key not in found.tied} == saved(root / "v1")
    complete(root / "v1", 1)
    verify(root / "v1", 1, found)


def test_a_model_s_own_code_is_neither_run_nor_asked_about(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (root / "own.py").write_text(f"open('{root}/run', 'w')\nfrom transformers import PretrainedConfig as Own\n")
    monkeypatch.setattr("builtins.input", lambda question: "yes")
    with pytest.raises(ValueError, match="trust_remote_code"):
        manifest.model_shapes(str(root))
    assert not (root / "run").exists()


OUT = ["..", "/etc", "unfinished/../..", "link"]
NOWHERE = ["unknown", "../v1", "a//v1", "v1/", "a\\v1", "v1\0"]


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        *((name, 422, "leads out of the root") for name in OUT),
        *((name, 404, "there is no '") for name in NOWHERE),
        *((name, 409, "no COMPLETE marker") for name in ("unfinished", ".", "")),
    ],
)
def test_a_name_that_is_no_finished_version_s_is_refused(tmp_path: Path, name: str, status: int, said: str) -> None:
    root = tmp_path.resolve() / "root"
    (root / "unfinished").mkdir(parents=True)
    (root / "link").symlink_to(root.parent)
    with pytest.raises(ApiError, match=said) as caught:
        versions.find(root, name)
    assert caught.value.status == status


def changed(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Returns what changes the stored tensors, of which the manifest knows nothing."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


NAME = "model.layers.0.mlp.down_proj.weight"


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def edit_manifest(folder: Path, **fields: Any) -> None:
    path = folder / manifest.MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


BAD = {
    "a newer version": (lambda f: edit_manifest(f, version=3), "the manifest is of version 3, not 2"),
    "an older version": (lambda f: edit_manifest(f, version=1), "the manifest is of version 1, not 2"),
    "truncated file": (truncate, "can't read the safetensors files"),
    "file lacks a tensor": (changed(lambda t: t.pop(NAME)), r"is missing in the files, \('float32'"),
    "two files with a tensor": (
        lambda f: shutil.copy(f / "model.safetensors", f / "more.safetensors"),
        "the files hold tensor .* twice",
    ),
    "other type than described": (
        changed(lambda t: t.update({NAME: t[NAME].half()})),
        r"is \('float16', .*\) in the files, \('float32', .*\) in the manifest",
    ),
    "integers": (
        lambda f: edit_manifest(f, tensors={NAME: {"dtype": "int32", "shape": [64, 128], "checksum": ""}}),
        "can't read manifest.json: .*bfloat16",
    ),
    "no manifest": (lambda f: (f / manifest.MANIFEST_FILE).unlink(), "can't read manifest.json"),
    "manifest of endless depth": (
        lambda f: (f / manifest.MANIFEST_FILE).write_text("[" * 100_000),
        "can't read manifest.json: ",
    ),
    "manifest of wrong tensors": (
        lambda f: edit_manifest(f, tensors={f"x{number}": number for number in range(20_000)}),
        "can't read manifest.json: body: 20000 fields are wrong",
    ),
    "manifest with a wrong sum": (lambda f: edit_manifest(f, checksum="0" * 32), "is not the one of its tensors"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_version_is_refused_with_the_reason(root: Path, shapes: Any, kind: str) -> None:
    spoil, said = BAD[kind]
    publish(make_model(tied=False, seed=1), root / "v2", 2)
    spoil(root / "v2")
    with pytest.raises(ApiError, match=said) as caught:
        verify(root / "v2", 2, shapes[False])
    assert (caught.value.status, caught.value.body.code) == (409, "bad_version")


def test_tied_tensors_that_differ_and_buckets_of_another_model_are_refused(root: Path, shapes: Any) -> None:
    publish(make_model(tied=False, seed=1), root / "v1", 1)
    ties = r"the model ties 'lm_head\.weight' to 'model\.embed_tokens\.weight': leave it out"
    with pytest.raises(ApiError, match=ties):
        verify(root / "v1", 1, shapes[True])

    def layout(tied: bool = False, **change: tuple[int, ...]) -> list[TensorLayout]:
        items = (dict(shapes[tied].shapes) | change).items()
        return [TensorLayout(name=name, dtype="float32", shape=list(shape)) for name, shape in items]

    for buckets, tied, said in (
        ([layout(**{NAME: (3, 3)})], False, r"is \(3, 3\) in the version, \(64, 128\) in the model"),
        ([layout(), layout()[:1]], False, "a tensor is named twice"),
        ([layout()[1:]], False, "is missing in the version"),
        ([layout(tied=True)], True, ties),
    ):
        with pytest.raises(ApiError, match=said):
            versions.check_buckets(buckets, shapes[tied])
    versions.check_buckets([layout()[1:]], shapes[False], partial=True)  # the rest stays as it is
    for wrong, said in ((layout(**{NAME: (3, 3)}), "64, 128"), (layout(other=(1,)), "missing in the model")):
        with pytest.raises(ApiError, match=said):
            versions.check_buckets([wrong], shapes[False], partial=True)


SMALL = manifest.ModelShapes(
    {"a.q_proj.weight": (6, 4), "a.q_proj.bias": (6,), "a.xq_proj.weight": (3, 4), "norm.weight": (4,)}, tied={}
)


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        (["q_proj", "norm"], {"a.q_proj.lora_A": (2, 4), "a.q_proj.lora_B": (6, 2)}),
        (["a.xq_proj"], {"a.xq_proj.lora_A": (2, 4), "a.xq_proj.lora_B": (3, 2)}),
        (["q.proj", ".*"], {}),  # names are no patterns
    ],
)
def test_an_adapter_has_two_matrices_of_its_rank_for_each_one_that_it_names(
    targets: list[str], adapted: dict[str, tuple[int, int]]
) -> None:
    adapter = AdapterConfig(base_model_name_or_path="base", r=2, lora_alpha=4.0, target_modules=targets)
    found = versions.adapter_shapes(adapter, SMALL, max_rank=2)
    assert found.shapes == {f"base_model.model.{name}.weight": shape for name, shape in adapted.items()}
    with pytest.raises(ApiError, match="takes adapters up to rank 1") as refused:
        versions.adapter_shapes(adapter, SMALL, max_rank=1)
    assert refused.value.body.code == "rank_too_high"


def test_a_version_has_four_bytes_for_each_number_and_64_mib_for_the_rest() -> None:
    assert versions.max_bytes(SMALL) == 4 * (24 + 6 + 12 + 4) + (64 << 20)


def test_what_killed_servers_left_is_removed_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    mine, left = versions.temporary_prefix() + "abc", f"hocket-weights-{ended.pid}-abc"
    for name in (mine, left, "hocket-weights-of-mine"):
        (tmp_path / name).mkdir()
    versions.remove_leftovers()
    assert {path.name for path in tmp_path.iterdir()} == {mine, "hocket-weights-of-mine"}
