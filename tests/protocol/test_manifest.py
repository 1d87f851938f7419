"""Checksums against the same formula in plain Python integers, and what they must notice."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hocket.protocol import manifest
from hocket.protocol.manifest import tensor_checksum, total_checksum

K = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, rounded to odd
BLOCK = 4096


def in_plain_python(data: bytes) -> str:
    """t ← t·K + Σ (2i + 1)·K·w_i over blocks of 2^12 64-bit words, modulo 2^64."""
    data += bytes(-len(data) % (8 * BLOCK))
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    total = 0
    for start in range(0, len(words), BLOCK):
        block = sum((2 * i + 1) * K * word for i, word in enumerate(words[start : start + BLOCK]))
        total = (total * K + block) % 2**64
    return f"{total:016x}"


def test_one_and_two_words_by_hand() -> None:
    # 1.0 in float32 is 0x3f800000, the lower half of a word; alone in its block it is multiplied by (2·0 + 1)·K.
    assert tensor_checksum(torch.tensor([1.0])) == f"{0x3F800000 * K % 2**64:016x}"
    assert tensor_checksum(torch.tensor([0.0, 1.0])) == f"{(0x3F800000 << 32) * K % 2**64:016x}"
    assert tensor_checksum(torch.tensor([2, 5])) == f"{(2 + 3 * 5) * K % 2**64:016x}"


@pytest.mark.parametrize(
    "count", [0, 1, 2, 3, 8, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK - 1, 8 * BLOCK + 3]
)
def test_numbers_of_any_size_and_count_agree_with_plain_python(count: int) -> None:
    values = torch.randint(-128, 128, (count,)) / 8
    for dtype, code in ((torch.float32, "f"), (torch.float16, "e"), (torch.int8, "b")):
        tensor = values.to(dtype)
        assert tensor_checksum(tensor) == in_plain_python(struct.pack(f"<{count}{code}", *tensor.tolist()))
    upper = b"".join(struct.pack("<f", value)[2:] for value in values.tolist())  # bfloat16: the upper half of float32
    assert tensor_checksum(values.bfloat16()) == in_plain_python(upper)


def test_a_tensor_is_summed_to_its_end_however_large_it_is() -> None:
    words = torch.zeros(513 * BLOCK + 1, dtype=torch.int64)  # 512 blocks are summed at once
    words[0], words[512 * BLOCK], words[-1] = 5, 3, 2
    assert tensor_checksum(words) == f"{(5 * K * K**513 + 3 * K * K + 2 * K) % 2**64:016x}"


@pytest.mark.parametrize("position", [0, 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 4])
def test_the_smallest_change_anywhere_is_noticed_and_the_layout_in_memory_does_not_matter(position: int) -> None:
    values = torch.zeros(2 * BLOCK + 5)
    changed = values.clone()
    changed[position] = torch.finfo(torch.float32).smallest_normal
    assert tensor_checksum(values) != tensor_checksum(changed)
    matrix = changed.view(-1, 7).t()
    assert tensor_checksum(matrix) == tensor_checksum(matrix.contiguous())
    halves = changed.bfloat16()[1:]  # starts between two words
    assert tensor_checksum(halves) == tensor_checksum(halves.clone())


def test_blocks_are_summed_alike_where_there_are_no_matrix_products_of_integers() -> None:
    blocks = torch.randint(-(2**63), 2**63 - 1, (3, BLOCK))
    factors = torch.arange(BLOCK) * 2**50 + 1

    class OnCuda(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    alike = manifest._block_sums(blocks.as_subclass(OnCuda), factors)
    assert manifest._block_sums(blocks, factors).tolist() == alike.tolist()
    assert alike.tolist() != [0, 0, 0]


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"shape": [1, 2]}, {"checksum": "0"}])
def test_a_versions_sum_covers_every_property_in_any_order(change: dict[str, object]) -> None:
    original, other = manifest.spec(torch.ones(2)), manifest.spec(torch.zeros(3))
    assert total_checksum({"a": original, "b": other}) == total_checksum({"b": other, "a": original})
    assert total_checksum({"a": original}) != total_checksum({"a": original.model_copy(update=change)})
    assert total_checksum({"a": original}) != total_checksum({"b": original})


def test_a_checkpoints_sum_covers_its_text_too() -> None:
    tensors = {"a": manifest.spec(torch.ones(2))}
    sums = {total_checksum(tensors, text) for text in ("", '{"step": 1}', '{"step": 2}')}
    assert len(sums) == 3


def test_a_written_version_is_complete_and_says_its_number_its_tensors_and_their_sum(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    specs = manifest.specs(manifest.tensors(tmp_path))
    checksum = manifest.write(tmp_path, 7, specs)
    written = json.loads((tmp_path / manifest.MANIFEST_FILE).read_text(encoding="utf-8"))
    assert (written["version"], written["checksum"]) == (7, checksum)
    assert checksum == total_checksum({name: manifest.spec(tensor) for name, tensor in tensors.items()})
    assert written["tensors"]["a"] == {"dtype": "float32", "shape": [2], "checksum": tensor_checksum(tensors["a"])}
    assert (tmp_path / manifest.COMPLETE_FILE).read_bytes() == b""


def test_code_that_lies_in_a_models_folder_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(Path(__file__).parents[2] / "checkpoints" / "tiny-sort", folder)
    expected = manifest.model_shapes(str(folder))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nfrom transformers import Qwen2Config\n")
    manifest.model_shapes.cache_clear()
    assert manifest.model_shapes(str(folder)) == expected
    assert not (tmp_path / "was_run").exists()
