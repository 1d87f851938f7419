"""The contract with vLLM: every name that our files of vLLM use."""

import ast
import contextlib
import importlib
import inspect
import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from prometheus_client import CollectorRegistry, Gauge

from hocket.config import load
from hocket.errors import ConfigError
from hocket.protocol import TensorSpec
from hocket.server import main, vllm_api, vllm_arguments, vllm_requests, vllm_text, vllm_weights, worker
from hocket.server.worker import WorkerExtension
from support import fakes
from support.engines import make_model

NAMES = {
    "vllm.config": "CacheConfig.block_size CacheConfig.num_gpu_blocks DeviceConfig LoRAConfig.max_lora_rank "
    "ModelConfig.dtype ModelConfig.get_vocab_size ModelConfig.max_model_len ParallelConfig.world_size",
    "vllm.engine.arg_utils": "AsyncEngineArgs.from_cli_args AsyncEngineArgs.create_engine_config",
    "vllm.lora.worker_manager": "LRUCacheWorkerLoRAManager.add_dummy_lora "
    "LRUCacheWorkerLoRAManager.get_dummy_lora_warmup_rank",
    "vllm.model_executor.model_loader.reload.inplace": "finalize_layerwise_reload",
    "vllm.model_executor.model_loader.reload.layerwise": "finalize_layerwise_reload get_layer_params_buffers "
    "get_layerwise_info is_deferred_attention_layer",
    "vllm.model_executor.model_loader.reload.meta": "SKIP_LOAD_TENSORS get_tensor_load_numel",
    "vllm.model_executor.model_loader.reload.types": "LayerReloadingInfo.can_load",
    "vllm.outputs": "CompletionOutput RequestOutput",
    "vllm.tool_parsers.abstract_tool_parser": "ToolParser.adjust_request ToolParser.extract_tool_calls",
    "vllm.v1.engine.async_llm": "AsyncLLM.abort AsyncLLM.errored AsyncLLM.shutdown",
    "vllm.v1.engine.detokenizer": "FastIncrementalDetokenizer._protected_step "
    "FastIncrementalDetokenizer.decode_next FastIncrementalDetokenizer.num_output_tokens "
    "FastIncrementalDetokenizer.update check_stop_strings",
    "vllm.v1.engine.core": "EngineCoreProc.run_engine_core get_kv_cache_configs",
    "vllm.v1.engine.utils": "get_mp_context",
    "vllm.v1.worker.gpu_worker": "Worker.add_lora Worker.reload_weights Worker.remove_lora",
}
"""What is used of vLLM besides the names that vllm_api.py imports, and ARGUMENTS."""
ARGUMENTS = {
    "collective_rpc": {"method", "args"},
    "generate": {"prompt", "sampling_params", "request_id", "lora_request"},
    "pause_generation": {"mode", "clear_cache"},
    "resume_generation": set[str](),
    "sleep": {"level", "mode"},
    "update_weight_version": {"new_version"},
    "wake_up": {"tags"},
}
"""Methods of AsyncLLM with the arguments that hocket gives."""


@pytest.fixture(scope="module", autouse=True)
def environment() -> Any:
    with patch.dict(os.environ):
        main.prepare_environment(1, threads=1)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        pytest.skip("vLLM's build for GPUs reads no arguments where there is none, or it is hidden")
    folder = tmp_path_factory.mktemp("model")
    make_model(seed=0).config.save_pretrained(folder)
    return str(folder)


def test_vllm_still_has_every_name_that_is_used() -> None:
    names = [(module, name) for module, names in NAMES.items() for name in names.split()]
    imported = [
        (node.module, alias.name)
        for module in (vllm_api, vllm_arguments, vllm_requests, vllm_text, vllm_weights)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm.")
        for alias in node.names
    ]
    assert len(imported) > 15
    for module, name in names + imported:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            assert hasattr(found, part), f"vLLM's {module} has no {name} any more: change the files vllm_*.py"
            found = getattr(found, part)


def test_a_reload_still_calls_what_a_load_replaces() -> None:
    from vllm.model_executor.model_loader.reload import inplace, types

    assert "finalize_layerwise_reload(model, model_config)" in inspect.getsource(inplace.reload_weights)
    fields = {"kernel_tensors", "load_numel", "loaded_weights"}
    assert fields <= types.LayerReloadingInfo.__dataclass_fields__.keys()


def test_calls_take_the_arguments_we_give() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.abstract import SLEEP_TAGS

    for method, arguments in ARGUMENTS.items():
        assert arguments <= inspect.signature(getattr(AsyncLLM, method)).parameters.keys(), method
    assert {"weights", "kv_cache"} == SLEEP_TAGS


def test_the_worker_has_no_method_of_our_extension_s_names() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    ours = {name for name in dir(WorkerExtension) if not name.startswith("__")}
    assert all("hocket" in name and not hasattr(Worker, name) for name in ours)


def test_memory_of_a_bucket_is_used_anew_only_when_it_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.current_stream", lambda: "the engine's")
    tensor, specs = Mock(is_cuda=True), dict[str, TensorSpec]()
    assert next(worker._tensors(iter([([("a", tensor)], {})]), specs)) == ("a", tensor)
    tensor.record_stream.assert_called_once_with("the engine's")


def test_the_kv_cache_has_no_more_blocks_than_all_requests_can_fill(model: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine import core
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    args = arguments(model, "model.max_length=100", "server.engine.max_num_seqs=8")
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    config.cache_config.kv_cache_layout = "NHD"  # as the engine chooses it
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    block = 2 * 2 * 16 * 32 * 4  # bytes: keys and values of two layers

    def blocks(memory: int, *, size: int | None = None, override: int | None = None) -> int:
        config.cache_config.kv_cache_memory_bytes, config.cache_config.num_gpu_blocks_override = size, override
        (planned,) = vllm_api.bounded(core.get_kv_cache_configs)(config, [{"a": spec, "b": spec}], [memory])
        return int(planned.num_blocks)

    most = 1 + 4 * 8 * 7  # of 4 x 8 requests, each of at most 7 blocks of 16 tokens
    assert blocks(80 << 30) == most
    assert blocks((most - 1) * block) == most - 1  # vLLM's own number
    assert blocks(1000 * block, size=1000 * block) == blocks(80 << 30, override=1000) == 1000  # the user's
    assert config.cache_config.num_gpu_blocks_override == 1000


def test_a_load_frees_its_memory_for_a_kv_cache_that_wakes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.empty_cache", free := Mock())
    for method in ("expert_methods", "reload", "packed_heads"):
        monkeypatch.setattr(vllm_weights, method, lambda *_: [])
    vllm_weights.load(SimpleNamespace(vllm_config=SimpleNamespace(lora_config=None)), iter(()), None)
    free.assert_called_once_with()


def arguments(model: str, *settings: str) -> Any:
    config = load(None, [f"model.path={model}", "server.kv_cache_mib=64", *settings])
    return vllm_arguments.app_arguments(vllm_arguments.engine_arguments(config))


@pytest.mark.parametrize("cpu", [True, False])
def test_torch_s_compiler_is_hidden_while_vllm_is_imported_on_cpus(cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = "torch._inductor.lowering"
    monkeypatch.delitem(sys.modules, compiler, raising=False)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setattr(vllm_arguments, "is_cpu_build", lambda: cpu)
    hidden = []

    def missing(name: str) -> None:
        hidden.append(compiler in sys.modules)
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with contextlib.suppress(ModuleNotFoundError):
        vllm_arguments.import_vllm()
    assert hidden == [True] * cpu
    assert compiler not in sys.modules


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", "lots", "'lots': invalid literal for int() with base 10: 'lots'; unset it"),
        ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "1m", "'1m': invalid literal for int()"),
        ("VLLM_HOST_IP", "192.0.2.7", "VLLM_HOST_IP=192.0.2.7 is no address of this machine: unset it"),
        ("VLLM_HOST_IP", "127.0.0.1", None),
    ],
)
def test_a_variable_that_vllm_can_not_use_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, problem: str | None
) -> None:
    monkeypatch.setenv(name, value)
    if problem is None:
        return vllm_arguments.refuse_variables()
    with pytest.raises(ConfigError) as refused:
        vllm_arguments.refuse_variables()
    assert name in str(refused.value)
    assert problem in str(refused.value)


def test_the_engine_gets_what_vllm_s_own_command_line_would_give_it(model: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = vllm_arguments.engine_arguments(load(None, [f"model.path={model}"]))
    alone = vars(AsyncEngineArgs.from_cli_args(given))
    parsed = vars(AsyncEngineArgs.from_cli_args(vllm_arguments.app_arguments(given)))
    differ = {name for name in alone if alone[name] != parsed[name]}
    assert differ <= {"mm_device_do_normalize", "reasoning_parser_plugin"}  # of images; None in place of ""


def test_the_arguments_say_what_the_config_says(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(model, "launch.share_gpu=true")
    assert (args.model, args.served_model_name, args.trust_remote_code) == (model, ["model0", model], False)
    assert (args.generation_config, args.logprobs_mode) == ("vllm", "processed_logprobs")
    assert (args.kv_cache_memory_bytes, args.max_num_seqs) == (64 << 20, vllm_arguments.CPU_SEQUENCES)
    assert args.block_size == vllm_arguments.CPU_BLOCK
    assert arguments(model, "server.engine={block_size: 64}").block_size == 64
    assert (args.enable_lora, args.hf_overrides or {}, args.enable_sleep_mode) == (False, {}, False)
    with_lora = arguments(model, "model.lora.rank=12", "model.dtype=bfloat16")
    assert (with_lora.enable_lora, with_lora.max_lora_rank, with_lora.dtype) == (True, 16, "bfloat16")  # 8, 16, 32 ...
    unset = arguments(model, "server.engine={served_model_name: null, tool_call_parser: null}")
    assert (unset.served_model_name, unset.enable_auto_tool_choice) == (["model0", model], False)
    assert arguments(model, "model.float32_head=true").hf_overrides == {"head_dtype": "float32"}
    # What the engine's own arguments say comes before hocket's own choice.
    own = "{served_model_name: mine, tool_call_parser: hermes, max_num_batched_tokens: 4096, enforce_eager: false}"
    args = arguments(model, f"server.engine={own}")
    assert (args.served_model_name, args.tool_call_parser) == (["mine", model], "hermes")
    assert args.enable_auto_tool_choice
    assert (args.max_num_batched_tokens, args.enforce_eager) == (4096, False)
    monkeypatch.setattr(vllm_arguments, "is_cpu_build", lambda: False)  # the CPU's worker can't sleep
    on_gpu = arguments(model, "launch.share_gpu=true")
    assert on_gpu.enable_sleep_mode
    assert (on_gpu.max_num_seqs, on_gpu.gpu_memory_utilization) == (None, 0.01)  # vLLM's own; no share must be free
    assert not arguments(model).enable_sleep_mode


@pytest.mark.parametrize(
    ("path", "engine", "names"),
    [
        ("runs/first/model", "{}", ["model", "runs/first/model"]),
        ("Qwen/Qwen3-0.6B", "{}", ["Qwen3-0.6B", "Qwen/Qwen3-0.6B"]),
        ("gpt2", "{}", ["gpt2"]),
        ("runs/first/model/", "{}", ["model", "runs/first/model/"]),
        (".", "{}", ["."]),
        ("runs/first/model", "{served_model_name: mine}", ["mine", "runs/first/model"]),
        ("runs/first/model", "{served_model_name: org/mine}", ["org/mine", "runs/first/model"]),
        ("runs/first/model", "{served_model_name: [mine, 7]}", ["mine", "7", "runs/first/model"]),
        ("gpt2", "{served_model_name: gpt2}", ["gpt2"]),
    ],
)
def test_clients_know_the_model_by_a_short_name_and_by_its_path(
    path: str, engine: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_arguments, "_build_defaults", lambda config: {})  # which read the model
    config = load(None, [f"model.path={path}", f"server.engine={engine}", "server.kv_cache_mib=64"])
    assert vllm_arguments.engine_arguments(config).served_model_name == names


@pytest.mark.parametrize("on_cpu", [True, False])
def test_vllm_knows_every_argument(model: str, monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setattr(vllm_arguments, "is_cpu_build", lambda: on_cpu)
    own = "server.engine={tool_call_parser: hermes}"
    args = arguments(model, "model.lora.rank=12", "model.float32_head=true", "model.dtype=bfloat16", own)
    assert vars(args).keys() == vars(make_arg_parser(FlexibleArgumentParser()).parse_args([])).keys()


OWNED = "can't be set, as hocket sets it:"


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("{max_model_len: 9}", f"server.engine.max_model_len {OWNED} set model.max_length"),
        ("{generation_config: auto}", f"server.engine.generation_config {OWNED} leave it out"),
        ("{worker_cls: mine}", f"server.engine.worker_cls {OWNED} leave it out"),
        ("{enforce_eage: 1}", "server.engine.enforce_eage: vLLM has no such engine argument (did you mean 'enforce_e"),
        ("{chat_template: x}", "server.engine.chat_template: vLLM has no such engine argument"),  # but its server has
        ("{tool_call_parser: hermesse}", "tool_call_parser=hermesse: vLLM has no such parser; it has "),
    ],
)
def test_an_engine_argument_that_hocket_owns_or_vllm_lacks_is_refused(model: str, engine: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        arguments(model, f"server.engine={engine}")


def test_what_ends_the_engine_s_process_is_kept_for_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.core import EngineCoreProc

    def fail() -> None:
        try:
            raise RuntimeError("Unsupported CPU attention configuration\nand more")
        except RuntimeError:
            logger.exception("EngineCore encountered a fatal error.")  # before it tells the server
            assert vllm_api.last_words(llm)
            raise

    logger = logging.getLogger("vllm.v1.engine.core")
    monkeypatch.setattr(logger, "filters", [])
    source = inspect.getsource(EngineCoreProc.run_engine_core)
    assert re.search(r'exception\("EngineCore .*"\)\n +engine_core._send_engine_dead\(\)', source)

    for name in ("die_with_parent_process", "allow_amx", "os.setpgid"):
        monkeypatch.setattr(f"hocket.server.vllm_api.{name}", lambda *_: None)
    monkeypatch.setattr(EngineCoreProc, "vllm_run_engine_core", fail, raising=False)
    llm = SimpleNamespace(last_words=tmp_path / "words")
    assert vllm_api.last_words(llm) == ""
    with pytest.raises(SystemExit) as ended:
        vllm_api.run_engine(llm.last_words)
    assert ended.value.code == 1
    assert vllm_api.last_words(llm) == f"Unsupported CPU attention configuration (its traceback is in {tmp_path}/words)"
    assert "in fail\n" in llm.last_words.read_text()
    assert capsys.readouterr().err == ""


def test_vllm_s_gauges_are_read_over_all_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    assert vllm_api.load() == {}
    waiting = Gauge("vllm:num_requests_waiting", "", ["engine"], registry=registry)
    use = Gauge("vllm:kv_cache_usage_perc", "", ["engine"], registry=registry)
    for engine, value in (("0", 0.25), ("1", 0.5)):
        waiting.labels(engine).set(8 * value)
        use.labels(engine).set(value)
    assert vllm_api.load() == {"waiting": 6, "kv_use": 0.5}
    assert fakes.health(**vllm_api.load()).waiting == 6
