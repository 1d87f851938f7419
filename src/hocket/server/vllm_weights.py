"""Change the weights of vLLM 0.32's worker, and compare them with a source, by its private names too.

A comparison is vLLM's own reload, of which every layer ends in a comparison in place of a copy: whatever the engine
fuses, shards or packs is compared in that form, and one layer at a time is in memory twice. It proves that the model
computes with what a load of the source gives; that such a load is right, and the export, the log-probs prove.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hocket import manifest
from hocket.protocol import AdapterConfig
from hocket.server import versions

ROWS = 256  # of an identity matrix that a packed matrix is multiplied by at once


def load_adapter(worker: Any, weights: Iterator[tuple[str, Any]], adapter: AdapterConfig) -> None:
    """Replace a worker's adapter, by private and temporary files: vLLM takes adapters from files only."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix=versions.temporary_prefix()) as folder:
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights}, f"{folder}/adapter_model.safetensors")
        Path(folder, manifest.ADAPTER_FILE).write_text(adapter.model_dump_json(), encoding="utf-8")
        worker.add_lora(adapter_request(folder, load_inplace=True))


def compare_adapter(worker: Any, weights: Iterator[tuple[str, Any]], adapter: AdapterConfig) -> list[str]:
    """Return the names of a worker's adapter tensors that differ from what a load of these gives; it stays as it is."""
    import torch

    held = [(name, slot, slot.clone()) for name, slot in _adapter_slots(worker)]
    try:
        for _, slot, _ in held:
            slot.fill_(torch.nan)  # what the load does not write differs
        load_adapter(worker, weights, adapter)
        return [name for name, slot, before in held if not torch.equal(slot, before)]
    finally:
        for _, slot, before in held:
            slot.copy_(before)


def _adapter_slots(worker: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that a worker computes its adapter with, by layer."""
    for name, module in worker.model_runner.get_model().named_modules():
        for attribute, slots in vars(module).items():
            if attribute in ("lora_a_stacked", "lora_b_stacked") or attribute.endswith(
                ("_lora_a_stacked", "_lora_b_stacked")
            ):
                slots = slots if isinstance(slots, tuple | list) else (slots,)
                yield from ((f"{name}.{attribute}.{number}", slot) for number, slot in enumerate(slots))


def drop_adapter(worker: Any) -> None:
    """Replace a worker's adapter by one that changes nothing: requests in flight must keep having one."""
    if worker.vllm_config.lora_config is not None:
        nothing = adapter_request("in memory")
        worker.remove_lora(nothing.lora_int_id)
        adapters = worker.model_runner.lora_manager
        adapters.add_dummy_lora(nothing, adapters.get_dummy_lora_warmup_rank(1))  # all zeros, as vLLM warms up with


def adapter_request(folder: str, *, load_inplace: bool = False) -> Any:
    """Return vLLM's name for the adapter of every request."""
    from vllm.lora.request import LoRARequest

    # One id for all versions: a request in flight goes on with the new one. Only load_inplace reads the folder.
    return LoRARequest("hocket", 1, folder, load_inplace=load_inplace)


def reload_worker(worker: Any, weights: Iterator[tuple[str, Any]]) -> None:
    """Load weights in checkpoint format into a worker's model, in place; after an error a complete load mends it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    def refuse(left: list[str]) -> None:
        if left:
            raise RuntimeError(f"vLLM's loader left out weights of {', '.join(left[:3])} ({len(left)} layers in all)")

    for method in _expert_methods(worker):
        method.moe_kernel = None
    _reload(worker, weights, refuse)
    # On a CPU a tied head keeps a packed copy of the old embedding, which vLLM's own reload does not renew.
    for module in worker.model_runner.get_model().modules() if current_platform.is_cpu() else ():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
    drop_adapter(worker)


def compare_worker(worker: Any, weights: Iterator[tuple[str, Any]]) -> list[str]:
    """Return the names of parameters that differ from what a load of these weights gives; the model stays as it is."""
    import torch
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import layerwise, meta
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    names = {layer: _plain(name) for name, layer in worker.model_runner.get_model().named_modules()}
    # An adapter of earlier weights must be gone.
    different = [name for name, slot in _adapter_slots(worker) if slot.any()]
    make, pack = meta.materialize_meta_tensor, utils.dispatch_cpu_unquantized_gemm

    def make_unwritten(like: Any) -> Any:
        # What the load does not write is found: NaN equals nothing.
        tensor = make(like)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    def compare_packed(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            pack(layer, remove_weight)  # in place: `compare` follows
        elif not isinstance(layer, VocabParallelEmbedding) and not _computes_with(layer.cpu_linear, layer.weight):
            different.append(f"{names[layer]}.weight")

    def compare(layer: Any, info: Any) -> None:
        parameters, buffers = info.kernel_tensors
        computed = info.kernel_non_persistent_buffers - {name for name, _ in info.loaded_weights}
        for name, held in (parameters | buffers).items():
            # A matrix that was packed on a CPU has no elements left.
            if name not in computed and held.numel() and not torch.equal(held, getattr(layer, name)):
                different.append(f"{names[layer]}.{name}")
        _place_kernel_tensors(layer, info)

    # Tensors of these names are loaded in place.
    live = [(layer, name) for layer in names for name in get_layer_tensors(layer) if name in meta.SKIP_TENSORS]
    before = [getattr(layer, name).clone() for layer, name in live]
    kernels = [(method, method.moe_kernel, method.moe_quant_config) for method in _expert_methods(worker)]
    try:
        for layer, name in live:
            if name == "bias":
                getattr(layer, name).data.fill_(torch.nan)
        for method, _, _ in kernels:
            method.moe_kernel = None
        with (
            _replaced(layerwise, "_copy_and_restore_kernel_tensors", compare),
            _replaced(meta, "materialize_meta_tensor", make_unwritten),
            _replaced(utils, "dispatch_cpu_unquantized_gemm", compare_packed),
        ):
            _reload(worker, weights, different.extend)
        for (layer, name), held in zip(live, before, strict=True):
            if not torch.equal(getattr(layer, name), held):
                different.append(f"{names[layer]}.{name}")
        for layer in names:
            packed = isinstance(layer, ParallelLMHead) and getattr(layer, "cpu_linear", None)
            if packed and not _computes_with(packed, layer.weight):
                different.append(f"{names[layer]}.weight")
    finally:
        for (layer, name), held in zip(live, before, strict=True):
            getattr(layer, name).data.copy_(held)
        for method, kernel, config in kernels:
            method.moe_kernel, method.moe_quant_config = kernel, config
        drop_adapter(worker)
    return different


def _computes_with(packed: Callable[..., Any], weight: Any) -> bool:
    """Return whether a packed matrix is this one: a product with 1 is exact, but for numbers too small to be normal."""
    import torch

    num_columns, tiny = weight.shape[1], torch.finfo(weight.dtype).tiny
    for start in range(0, num_columns, ROWS):
        part = weight[:, start : start + ROWS].t()
        rows = weight.new_zeros(len(part), num_columns)
        rows[:, start:].fill_diagonal_(1)
        if not ((packed(rows, weight, None) - part).abs() <= tiny).all():
            return False
    return True


def _expert_methods(worker: Any) -> "list[Any]":
    """Return what, on a CPU, packs experts for its kernel only as it builds that: it has to build it again."""
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.platforms import current_platform

    modules = worker.model_runner.get_model().modules() if current_platform.is_cpu() else ()
    methods = {
        id(method): method
        for module in modules
        if isinstance(method := getattr(module, "quant_method", None), FusedMoEMethodBase)
    }
    return list(methods.values())


def _reload(worker: Any, weights: Iterator[tuple[str, Any]], judge: Callable[[list[str]], None]) -> None:
    """Run vLLM's reload; `judge` is given the layers with weights left out, about which vLLM only writes to its log."""
    from vllm.model_executor.model_loader.reload import inplace

    finalize = inplace.finalize_layerwise_reload

    def judged(model: Any, *rest: Any) -> None:
        judge(_left_out(model))
        finalize(model, *rest)

    try:
        with _replaced(inplace, "finalize_layerwise_reload", judged):
            worker.reload_weights(weights_iterator=weights)
    except BaseException:
        _end_reload(worker)
        raise


def _left_out(model: Any) -> list[str]:
    """Return the layers of a half reloaded model whose weights have not all come, but for those tied to others."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
    from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_tensor_load_numel

    complete, left = set[int](), dict[str, set[int]]()
    for name, layer in model.named_modules():
        info, (own, _) = get_layerwise_info(layer), get_layer_params_buffers(layer)
        held = set(map(id, (info.kernel_tensors or (own,))[0].values()))
        wanted = sum(get_tensor_load_numel(own[name]) for name in own.keys() - SKIP_LOAD_TENSORS)
        if isinstance(layer, VocabParallelEmbedding):
            wanted = min(wanted, 1)  # it may be padded
        if not info.can_load() or is_deferred_attention_layer(layer) or info.load_numel >= wanted:
            complete |= held
        else:
            left[_plain(name)] = held
    return [name for name, held in left.items() if not held <= complete]


@contextlib.contextmanager
def _replaced(module: Any, name: str, function: Any) -> Iterator[None]:
    """Put another function in the place of one of vLLM's."""
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


def _plain(name: str) -> str:
    """Return the name of a layer as it is without an adapter around it."""
    return name.replace(".base_layer", "")


def _end_reload(worker: Any) -> None:
    """Drop the tensors of every layer that still waits for some, and restore its old ones.

    vLLM would count them as part of the next load and drop as many of its tensors.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info

    model = worker.model_runner.get_model()
    for module in model.modules():
        waiting = get_layerwise_info(module)
        if waiting.can_load():
            waiting.load_numel = 0
            waiting.loaded_weights.clear()
    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(model, worker.model_config)
