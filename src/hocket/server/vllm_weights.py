"""Change the weights of vLLM 0.32's worker, by its private names too."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hocket.common.registry import Registry
from hocket.protocol import AdapterConfig, manifest
from hocket.server import versions

NamedTensors = Iterator[tuple[str, Any]]
CompareModel = Callable[[Any, NamedTensors, AdapterConfig | None], list[str]]
"""(vLLM's worker, tensors of a version, of an adapter) -> names of the tensors of its model that differ."""
COMPARISONS: Registry[CompareModel] = Registry(
    "comparison",
    bitwise="hocket.extras.checks.bitwise",
)
comparison = COMPARISONS.register
"""Decorator of a function that compares a worker's model with a version, and leaves it as it was."""


def load(worker: Any, weights: NamedTensors, adapter: AdapterConfig | None) -> None:
    """Load tensors into a worker's model or adapter, in place. After an error a complete load mends it."""
    import torch

    if adapter is not None:
        add_adapter(worker, weights, adapter)
        return
    # vLLM packs experts for a CPU only where it builds their kernel: have it build a new one.
    for method in expert_methods(worker):
        method.moe_kernel = None
    incomplete = reload(worker, weights)
    if incomplete:
        names = f"{', '.join(incomplete[:3])} ({len(incomplete)} in all)"
        raise RuntimeError(
            f"vLLM's loader left out weights of {names}; can this release reload this architecture?"
        )
    # vLLM's reload leaves the packed copy of a tied head as it was.
    for _, head in packed_heads(worker):
        head.quant_method.process_weights_after_loading(head)
    # The adapter belonged to the weights that are gone.
    drop_adapter(worker)
    torch.cuda.empty_cache()  # a KV cache that sleeps needs the memory of the load's tensors


def add_adapter(worker: Any, weights: NamedTensors, adapter: AdapterConfig) -> None:
    """Give vLLM an adapter in temporary files: it takes no others."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix=versions.temporary_prefix()) as folder:
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in weights},
            f"{folder}/adapter_model.safetensors",
        )
        Path(folder, manifest.ADAPTER_FILE).write_text(adapter.model_dump_json(), encoding="utf-8")
        worker.add_lora(adapter_request(folder, load_inplace=True))


def drop_adapter(worker: Any) -> None:
    """Replace a worker's adapter by one that changes nothing: requests in flight must have one."""
    if worker.vllm_config.lora_config is not None:
        nothing = adapter_request("in memory")
        worker.remove_lora(nothing.lora_int_id)
        adapters = worker.model_runner.lora_manager
        # vLLM warms up with this adapter: all of it is zero.
        adapters.add_dummy_lora(nothing, adapters.get_dummy_lora_warmup_rank(1))


def adapter_request(folder: str, *, load_inplace: bool = False) -> Any:
    """Name the adapter to vLLM, which reads the folder only with `load_inplace`."""
    from vllm.lora.request import LoRARequest

    # One id for all versions: a request in flight goes on with the new one.
    return LoRARequest("hocket", 1, folder, load_inplace=load_inplace)


def layers(worker: Any) -> list[tuple[str, Any]]:
    """List the layers with their names, without an adapter around them."""
    modules = worker.model_runner.get_model().named_modules()
    return [(name.replace(".base_layer", ""), layer) for name, layer in modules]


def expert_methods(worker: Any) -> list[Any]:
    """Find the methods that pack experts only when they build their kernel, as they do on a CPU."""
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    methods = {getattr(layer, "quant_method", None) for _, layer in layers(worker)}
    return [method for method in methods if isinstance(method, FusedMoEMethodBase)]


def packed_heads(worker: Any) -> list[tuple[str, Any]]:
    """Find the output heads with a packed copy, which they have on a CPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    heads = [(name, layer) for name, layer in layers(worker) if isinstance(layer, ParallelLMHead)]
    return [(name, head) for name, head in heads if hasattr(head, "cpu_linear")]


def reload(worker: Any, weights: NamedTensors) -> list[str]:
    """Run vLLM's reload. Returns the layers with weights left out, which vLLM only logs.

    What came is counted before vLLM finishes the reload, as it forgets the counts then. No other
    check sees a matrix that vLLM's loader dropped (missing_matrix in tests/lies.py).
    """
    from vllm.model_executor.model_loader.reload import inplace

    finalize = inplace.finalize_layerwise_reload
    incomplete = list[str]()

    def look_and_finalize(*arguments: Any) -> None:
        incomplete.extend(_incomplete(worker))
        finalize(*arguments)

    try:
        with patch.object(inplace, "finalize_layerwise_reload", look_and_finalize):
            worker.reload_weights(weights_iterator=weights)
    except BaseException:
        _end_reload(worker)
        raise
    return incomplete


def _incomplete(worker: Any) -> list[str]:
    """List the layers whose weights have not all come."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import layerwise, meta

    # Where only trained weights come, a layer of which nothing came stays as it is.
    may_stay = bool(getattr(worker, "hocket_kept", {}))
    # Parameters by id, as those of a tied layer come with another layer.
    complete = set[int]()
    incomplete = dict[str, set[int]]()
    for name, layer in layers(worker):
        info = layerwise.get_layerwise_info(layer)
        # A layer that is still loading has placeholders as its parameters, and the real ones aside.
        parameters, _ = layerwise.get_layer_params_buffers(layer)
        real_parameters, _ = info.kernel_tensors or (parameters, {})
        ids = set(map(id, real_parameters.values()))

        # How many numbers must have come for it.
        names = parameters.keys() - meta.SKIP_LOAD_TENSORS
        wanted = sum(meta.get_tensor_load_numel(parameters[name]) for name in names)
        if isinstance(layer, VocabParallelEmbedding):
            wanted = min(wanted, 1)  # it may be padded
        if may_stay and info.load_numel == 0:
            wanted = 0

        # vLLM can't load a complete layer any more. Attention has scales at most, which may stay.
        is_loading = info.can_load() and not layerwise.is_deferred_attention_layer(layer)
        if is_loading and info.load_numel < wanted:
            incomplete[name] = ids
        else:
            complete |= ids
    return [name for name, ids in incomplete.items() if not ids <= complete]


def _end_reload(worker: Any) -> None:
    """Drop what came of a reload that broke off, and restore the old tensors of unfinished layers.

    Otherwise vLLM counts what came as part of the next load, and drops as much of that.
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
