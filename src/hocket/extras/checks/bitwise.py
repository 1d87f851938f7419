"""Compare the tensors that vLLM 0.32's worker computes with against a version, bit for bit.

A comparison is vLLM's own reload in which every layer ends in a comparison, not in a copy: what the
engine fuses, shards or packs is compared in that form. So it verifies that the model computes with
what a load of the source gives; verify.py checks by log-probs that this load and the export are
right.

vLLM's own `compute_weight_checksums` before and after another load would need no private function,
but it sees parameters only. On a CPU vLLM packs every matrix into a copy that is no parameter: the
lies frozen_matrix, permuted_rows, frozen_vision and vision_off (tests/lies.py) stay hidden from it.
And a comparison that breaks off must leave the model as it was, which another load does not.

A tensor that vLLM's loader does not write is new memory here, and so differs but by chance. Loading
names such layers by itself (vllm_weights.reload).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from hocket.protocol import AdapterConfig
from hocket.server.vllm_weights import (
    NamedTensors,
    add_adapter,
    comparison,
    drop_adapter,
    expert_methods,
    layers,
    packed_heads,
    reload,
)

ROWS = 256  # rows of an identity matrix that are multiplied at once


@comparison("bitwise")
def compare(worker: Any, weights: NamedTensors, adapter: AdapterConfig | None) -> list[str]:
    """List the names of what a load of these tensors would change."""
    if adapter is None:
        return _compare_model(worker, weights)
    with _unwritten(_adapter_slots(worker)) as different:
        add_adapter(worker, weights, adapter)
    return different


def _adapter_slots(worker: Any) -> dict[str, Any]:
    """Find the tensors in which vLLM keeps an adapter."""
    slots = {}
    for name, layer in layers(worker):
        for attribute, tensors in vars(layer).items():
            if attribute.endswith(("lora_a_stacked", "lora_b_stacked")):
                for number, tensor in enumerate(tensors):
                    slots[f"{name}.{attribute}.{number}"] = tensor
    return slots


def _compare_model(worker: Any, weights: NamedTensors) -> list[str]:
    import torch
    from vllm.model_executor.layers import utils
    from vllm.model_executor.model_loader.reload import layerwise

    compared = _LayerComparison(worker)
    with contextlib.ExitStack() as restoring:
        restoring.callback(torch.cuda.empty_cache)
        restoring.callback(drop_adapter, worker)
        # vLLM packs experts as it builds their kernel: it must build one now, and then use the old.
        for method in expert_methods(worker):
            kept = patch.multiple(
                method,
                moe_kernel=None,
                moe_quant_config=method.moe_quant_config,
            )
            restoring.enter_context(kept)
        in_place = restoring.enter_context(_unwritten(_loaded_in_place(worker)))
        # Where vLLM copies a layer's new tensors over the old ones, compare both. This sees all
        # tensors that stay parameters, as all do on a GPU: the lies frozen_norm and swapped_norms.
        restoring.enter_context(
            patch.object(layerwise, "_copy_and_restore_kernel_tensors", compared.compare_layer)
        )
        # Where vLLM packs a matrix for a CPU, compare it with the packed one: the lies
        # frozen_matrix, swapped_layers, permuted_rows, frozen_vision and vision_off.
        restoring.enter_context(
            patch.object(utils, "dispatch_cpu_unquantized_gemm", compared.compare_packed)
        )
        incomplete = reload(worker, weights)
    different = list(in_place) + compared.different + list(incomplete)
    # vLLM's reload does not pack a tied head anew: it is compared as it is.
    for name, head in packed_heads(worker):
        if not _computes_with(head.cpu_linear, head.weight):
            different.append(name)
    return different


class _LayerComparison:
    """Replaces the functions by which vLLM's reload changes a layer; collects the names of tensors
    that differ."""

    def __init__(self, worker: Any) -> None:
        from vllm.model_executor.layers import utils

        self.different = list[str]()
        self._names = {layer: name for name, layer in layers(worker)}
        self._pack = utils.dispatch_cpu_unquantized_gemm

    def compare_packed(self, layer: Any, remove_weight: bool) -> None:
        """Compare a matrix with its packed copy, which alone is kept."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        if layer.weight.ndim != 2:
            self._pack(layer, remove_weight)  # in place: `compare_layer` follows
            return
        is_head = isinstance(layer, VocabParallelEmbedding)  # which `packed_heads` has
        if not is_head and not _computes_with(layer.cpu_linear, layer.weight):
            self.different.append(f"{self._names[layer]}.weight")

    def compare_layer(self, layer: Any, info: Any) -> None:
        """Compare a layer's new tensors with the old ones, and put these back."""
        import torch
        from vllm.model_executor.model_loader.reload import layerwise, meta

        (parameters, buffers) = info.kernel_tensors
        fresh = meta.get_layer_tensors(layer)
        computed = info.kernel_non_persistent_buffers - dict(info.loaded_weights).keys()
        for name, kept in (parameters | buffers).items():
            # Nothing is left here of a matrix that `compare_packed` has seen.
            is_here = kept.numel() > 0 and name in fresh.keys() - computed
            if is_here and not torch.equal(kept, fresh[name]):
                self.different.append(f"{self._names[layer]}.{name}")
        layerwise._place_kernel_tensors(layer, info)


def _loaded_in_place(worker: Any) -> dict[str, Any]:
    """Find the parameters that vLLM's reload overwrites in place.

    Buffers are left out, as they may come from no file.
    """
    from vllm.model_executor.model_loader.reload import meta

    parameters = {}
    for name, layer in layers(worker):
        for key, tensor in layer.named_parameters(recurse=False):
            if key in meta.SKIP_TENSORS and tensor.is_floating_point():
                parameters[f"{name}.{key}"] = tensor
    return parameters


@contextlib.contextmanager
def _unwritten(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    """Blank tensors for a load. Then add the names of those that differ, and restore all values."""
    import torch

    before = {}
    different = list[str]()
    try:
        for name, tensor in tensors.items():
            before[name] = tensor.clone()
            tensor.data.fill_(torch.nan)  # which equals nothing
        yield different
        for name, tensor in tensors.items():
            if not torch.equal(tensor, before[name]):
                different.append(name)
    finally:
        for name, kept in before.items():
            tensors[name].data.copy_(kept)


def _computes_with(packed: Callable[..., Any], weight: Any) -> bool:
    """Check whether a packed matrix is this one.

    It is multiplied by the identity: products with 1 are exact, but for subnormal numbers.
    """
    import torch

    num_columns = weight.shape[1]
    tiny = torch.finfo(torch.float32).tiny
    for start in range(0, num_columns, ROWS):
        part = weight[:, start : start + ROWS].t()
        rows = weight.new_zeros(len(part), num_columns)
        rows[:, start:].fill_diagonal_(1)
        product = packed(rows, weight, None)
        # Almost all matrices are equal, which is found out far sooner than how close they are.
        if torch.equal(product, part):
            continue
        if not torch.allclose(product, part, rtol=0, atol=tiny):
            return False
    return True
