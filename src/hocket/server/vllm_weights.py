"""Change the weights of vLLM 0.32's worker, and compare them with a source, by its private names too.

A comparison is vLLM's own reload in which every layer ends in a comparison, not a copy: what the engine fuses, shards
or packs is compared in that form. It proves that the model computes with what a load of the source gives; that this
and the export are right, the log-probs prove.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hocket.protocol import AdapterConfig, manifest
from hocket.server import versions

NamedTensors = Iterator[tuple[str, Any]]
ROWS = 256  # of an identity matrix, multiplied at once


def load(worker: Any, weights: NamedTensors, adapter: AdapterConfig | None) -> None:
    """Load tensors into a worker's model or adapter, in place; after an error a complete load mends it."""
    import torch

    if adapter is not None:
        return _add_adapter(worker, weights, adapter)
    for method in _expert_methods(worker):
        method.moe_kernel = None
    if left := _reload(worker, weights):
        layers = f"{', '.join(left[:3])} ({len(left)} in all)"
        raise RuntimeError(f"vLLM's loader left out weights of {layers}; can this release reload this architecture?")
    for _, head in _packed_heads(worker):
        head.quant_method.process_weights_after_loading(head)
    drop_adapter(worker)
    torch.cuda.empty_cache()  # a KV cache that sleeps needs the memory of the load's tensors


def compare(worker: Any, weights: NamedTensors, adapter: AdapterConfig | None) -> list[str]:
    """Return the names of what a load of these tensors would change."""
    if adapter is None:
        return _compare_model(worker, weights)
    with _unwritten(_adapter_slots(worker)) as different:
        _add_adapter(worker, weights, adapter)
    return different


def _add_adapter(worker: Any, weights: NamedTensors, adapter: AdapterConfig) -> None:
    """Give vLLM an adapter in temporary files: it takes no others."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix=versions.temporary_prefix()) as folder:
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights}, f"{folder}/adapter_model.safetensors")
        Path(folder, manifest.ADAPTER_FILE).write_text(adapter.model_dump_json(), encoding="utf-8")
        worker.add_lora(adapter_request(folder, load_inplace=True))


def _adapter_slots(worker: Any) -> dict[str, Any]:
    return {
        f"{name}.{attribute}.{number}": slot
        for name, layer in _layers(worker)
        for attribute, slots in vars(layer).items()
        if attribute.endswith(("lora_a_stacked", "lora_b_stacked"))
        for number, slot in enumerate(slots)
    }


def drop_adapter(worker: Any) -> None:
    """Replace a worker's adapter by one that changes nothing: requests in flight must have one."""
    if worker.vllm_config.lora_config is not None:
        nothing = adapter_request("in memory")
        worker.remove_lora(nothing.lora_int_id)
        adapters = worker.model_runner.lora_manager
        adapters.add_dummy_lora(nothing, adapters.get_dummy_lora_warmup_rank(1))  # all zeros, as vLLM warms up with


def adapter_request(folder: str, *, load_inplace: bool = False) -> Any:
    from vllm.lora.request import LoRARequest

    # One id for all versions: a request in flight goes on with the new one. Only load_inplace reads the folder.
    return LoRARequest("hocket", 1, folder, load_inplace=load_inplace)


def _compare_model(worker: Any, weights: NamedTensors) -> list[str]:
    import torch
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import layerwise, meta

    names = {layer: name for name, layer in _layers(worker)}
    make = meta.materialize_meta_tensor
    pack = utils.dispatch_cpu_unquantized_gemm

    def make_unwritten(like: Any) -> Any:
        tensor = make(like)
        tensor.untyped_storage().fill_(0xFF)  # NaN
        return tensor

    def compare_packed(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            pack(layer, remove_weight)  # in place: `compare` follows
        elif not isinstance(layer, VocabParallelEmbedding) and not _computes_with(layer.cpu_linear, layer.weight):
            different.append(f"{names[layer]}.weight")

    def compare(layer: Any, info: Any) -> None:
        (parameters, buffers) = info.kernel_tensors
        fresh = meta.get_layer_tensors(layer)
        computed = info.kernel_non_persistent_buffers - dict(info.loaded_weights).keys()
        for name, held in (parameters | buffers).items():
            # Of a matrix that `compare_packed` has seen nothing is left here.
            if held.numel() and name in fresh.keys() - computed and not torch.equal(held, fresh[name]):
                different.append(f"{names[layer]}.{name}")
        layerwise._place_kernel_tensors(layer, info)

    loaded_in_place = {
        f"{name}.{key}": tensor
        for layer, name in names.items()
        for key, tensor in layer.named_parameters(recurse=False)  # a buffer may come from no file
        if key in meta.SKIP_TENSORS and tensor.is_floating_point()
    }
    with contextlib.ExitStack() as restoring:
        restoring.callback(torch.cuda.empty_cache)
        restoring.callback(drop_adapter, worker)
        for method in _expert_methods(worker):
            kept = patch.multiple(method, moe_kernel=None, moe_quant_config=method.moe_quant_config)
            restoring.enter_context(kept)
        different = restoring.enter_context(_unwritten(loaded_in_place))
        restoring.enter_context(patch.object(layerwise, "_copy_and_restore_kernel_tensors", compare))
        restoring.enter_context(patch.object(meta, "materialize_meta_tensor", make_unwritten))
        restoring.enter_context(patch.object(utils, "dispatch_cpu_unquantized_gemm", compare_packed))
        different += _reload(worker, weights)
    heads = _packed_heads(worker)
    return different + [name for name, head in heads if not _computes_with(head.cpu_linear, head.weight)]


@contextlib.contextmanager
def _unwritten(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    """Blank tensors for a load; then add the names of those that differ, and put back what they held."""
    import torch

    held = {}
    different = list[str]()
    try:
        for name, tensor in tensors.items():
            held[name] = tensor.clone()
            tensor.data.fill_(torch.nan)  # which equals nothing
        yield different
        different += [name for name, tensor in tensors.items() if not torch.equal(tensor, held[name])]
    finally:
        for name, kept in held.items():
            tensors[name].data.copy_(kept)


def _computes_with(packed: Callable[..., Any], weight: Any) -> bool:
    """Check whether a packed matrix is this one: products with 1 are exact, but for subnormal numbers."""
    import torch

    num_columns = weight.shape[1]
    tiny = torch.finfo(torch.float32).tiny
    for start in range(0, num_columns, ROWS):
        part = weight[:, start : start + ROWS].t()
        rows = weight.new_zeros(len(part), num_columns)
        rows[:, start:].fill_diagonal_(1)
        if not torch.allclose(packed(rows, weight, None), part, rtol=0, atol=tiny):
            return False
    return True


def _layers(worker: Any) -> list[tuple[str, Any]]:
    """Return named layers, without an adapter around them."""
    layers = worker.model_runner.get_model().named_modules()
    return [(name.replace(".base_layer", ""), layer) for name, layer in layers]


def _expert_methods(worker: Any) -> list[Any]:
    """Find the methods that, on a CPU, pack experts only as they build their kernel: again for new weights."""
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.platforms import current_platform

    methods = {getattr(layer, "quant_method", None) for _, layer in _layers(worker)}
    return [method for method in methods if isinstance(method, FusedMoEMethodBase) and current_platform.is_cpu()]


def _packed_heads(worker: Any) -> list[tuple[str, Any]]:
    """Return output heads with a packed copy, on a CPU: vLLM's reload doesn't renew that of a tied one."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return [item for item in _layers(worker) if isinstance(item[1], ParallelLMHead) and hasattr(item[1], "cpu_linear")]


def _reload(worker: Any, weights: NamedTensors) -> list[str]:
    """Run vLLM's reload; return the layers with weights left out, which vLLM only logs."""
    from vllm.model_executor.model_loader.reload import inplace

    finalize = inplace.finalize_layerwise_reload
    left = list[str]()

    def look_and_finalize(*arguments: Any) -> None:
        left.extend(_left_out(worker))
        finalize(*arguments)

    try:
        with patch.object(inplace, "finalize_layerwise_reload", look_and_finalize):
            worker.reload_weights(weights_iterator=weights)
    except BaseException:
        _end_reload(worker)
        raise
    return left


def _left_out(worker: Any) -> list[str]:
    """Return the layers, but for tied ones, whose weights have not all come."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import layerwise, meta

    stays = bool(getattr(worker, "hocket_kept", {}))  # what does not come
    complete = set[int]()
    left = dict[str, set[int]]()
    for name, layer in _layers(worker):
        info = layerwise.get_layerwise_info(layer)
        (own, _) = layerwise.get_layer_params_buffers(layer)
        (held, _) = info.kernel_tensors or (own, {})
        ids = set(map(id, held.values()))
        wanted = sum(meta.get_tensor_load_numel(own[name]) for name in own.keys() - meta.SKIP_LOAD_TENSORS)
        if isinstance(layer, VocabParallelEmbedding):
            wanted = min(wanted, 1)  # it may be padded
        if stays and info.load_numel == 0:
            wanted = 0
        if not info.can_load() or layerwise.is_deferred_attention_layer(layer) or info.load_numel >= wanted:
            complete |= ids
        else:
            left[name] = ids
    return [name for name, ids in left.items() if not ids <= complete]


def _end_reload(worker: Any) -> None:
    """Restore the old tensors of layers that wait for some, and drop what came.

    vLLM would count it as part of the next load, and drop as much of that.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import layerwise

    model = worker.model_runner.get_model()
    for layer in model.modules():
        waiting = layerwise.get_layerwise_info(layer)
        waiting.load_numel = 0
        waiting.loaded_weights.clear()
    with set_current_vllm_config(worker.vllm_config):
        layerwise.finalize_layerwise_reload(model, worker.model_config)
