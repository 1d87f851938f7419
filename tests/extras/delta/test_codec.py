"""Changes of tensors: lossless to the last bit, and small."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hocket.extras.delta import codec as delta
from hocket.protocol import manifest


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8])
@pytest.mark.parametrize("density", [0.0, 1e-5, 1e-3, 0.03, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("shape", [(), (1,), (70_001,), (300, 1000)])
def test_any_change_of_any_tensor_comes_back_bit_by_bit(
    dtype: torch.dtype, density: float, shape: tuple[int, ...]
) -> None:
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    old_bytes, noise = (torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for _ in range(2))
    old_bytes[: dtype.itemsize], noise[: dtype.itemsize] = 0, 0
    noise[dtype.itemsize - 1] = 0x80  # 0.0 becomes -0.0, where it is hit
    old = old_bytes.view(dtype).view(shape)
    hit = torch.rand(old.numel()) < density
    new_bytes = old_bytes.view(-1, dtype.itemsize).clone()
    new_bytes[hit] ^= noise.view(-1, dtype.itemsize)[hit]
    new = new_bytes.view(-1).view(dtype).view(shape)
    change = delta.encode(old, new)
    # Of bits, not numbers: NaN differs from itself, and -0.0 equals 0.0.
    assert change.num_changed == int((new_bytes != old_bytes.view(-1, dtype.itemsize)).any(dim=1).sum())
    assert change.packed.nbytes <= 1.001 * new.nbytes + 16
    assert torch.equal(delta.apply(raw(old), change.packed), raw(new))
    assert torch.equal(delta.apply(raw(new), change.packed), raw(old))
    assert torch.equal(raw(old), old_bytes)  # which was left as it was


def test_one_in_a_hundred_of_a_bfloat16_tensor_takes_a_seventieth_of_it() -> None:
    old = torch.randn(1_000_000).bfloat16()
    new = old.clone()
    new.view(torch.int16)[torch.randperm(1_000_000)[:10_000]] += 1  # to the next number, as by a small step
    # Up to 2.86 bytes for each change; the entropy of its distance from the one before is 1.01.
    assert delta.encode(old, new).packed.nbytes / old.nbytes < 0.0143


@pytest.mark.parametrize("num_elements", [3, 5])
def test_a_change_made_for_another_tensor_is_an_error(num_elements: int) -> None:
    change = delta.encode(torch.zeros(4), torch.ones(4))
    with pytest.raises(OSError, match="ZSTD"):
        delta.apply(raw(torch.zeros(num_elements)), change.packed)


def test_files_are_patched_in_place_whichever_holds_the_tensor(tmp_path: Path) -> None:
    old = {"a.weight": torch.randn(40, 50), "b": torch.randn(9).bfloat16(), "c": torch.randn(30).half()}
    new = {"a.weight": old["a.weight"].index_add(0, torch.tensor([0, 7]), torch.ones(2, 50)), "b": old["b"] * 2}
    new["c"] = old["c"]
    files, folder = tmp_path / "files", tmp_path / "delta"
    files.mkdir()
    folder.mkdir()
    save_file({"a.weight": old["a.weight"]}, files / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": old["b"], "c": old["c"]}, files / "model-2.safetensors")
    delta.save({name: delta.encode(old[name], new[name]) for name in old}, folder, "1234")
    assert delta.base_of(folder) == "1234"
    assert sorted(load_file(folder / "delta.safetensors")) == ["a.weight", "b"]
    delta.patch(files, folder)
    found = dict(manifest.tensors(files))
    assert found.keys() == new.keys()
    assert all(torch.equal(raw(found[name]), raw(tensor)) for name, tensor in new.items())
