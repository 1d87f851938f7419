"""Tiny random models, adapters and published versions of them, and engines that are none: fakes of vLLM's."""

import asyncio
import contextlib
import copy
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import torch
import transformers
from safetensors.torch import save_file

from hocket.config import load
from hocket.protocol import AdapterConfig, TensorSpec, manifest, nccl
from hocket.server import main, vllm_requests
from hocket.server.app import assemble
from hocket.server.engine import Engine
from hocket.server.generate import Sampler
from hocket.sync.disk import DiskTransport
from hocket.sync.versions import Versions
from support import fakes, tokenizers
from support.numbers import rounding

MODEL_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}
SPECIAL = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m['role'] }}:{{ m['content'] }};"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
MATRICES = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
"""All that an adapter may adapt."""


def make_tokenizer() -> Any:
    """Characters 33 to 122 as ids 3 to 92, besides three special ones; smaller than the model's vocabulary."""
    words = ["<pad>", "<eos>", "<unk>", *map(chr, range(33, 123))]
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return tokenizers.make_tokenizer(words, TEMPLATE, split=tokenizers.CHARACTERS, **special)


def make_model(*, seed: int, tied: bool = True, **sizes: int) -> Any:
    """A Qwen2 model whose every weight depends on the seed."""
    config = transformers.Qwen2Config(**(MODEL_SIZES | sizes), **SPECIAL, tie_word_embeddings=tied)
    return randomize(transformers.Qwen2ForCausalLM(config), seed)


def make_experts(*, seed: int) -> Any:
    """A Qwen3-MoE model whose every weight depends on the seed."""
    experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    return randomize(
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MODEL_SIZES, **experts, **SPECIAL)), seed
    )


def randomize(model: Any, seed: int, part: str = "") -> Any:
    """Draws the parameters with `part` in their names: large enough that every one of them matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                mean = 1.0 if "norm" in name else 0.0
                parameter.copy_(mean + 0.15 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def publish(model: Any, folder: Path, version: int, *, dtype: str = "float32", drop: Sequence[str] = ()) -> str:
    """Writes a published version as the trainer does; returns its checksum."""
    tensors = checkpoint(model, model.state_dict().items(), dtype)
    return write_version({name: tensor for name, tensor in tensors.items() if name not in drop}, folder, version)


def checkpoint(model: Any, tensors: Iterable[tuple[str, Any]], dtype: str) -> dict[str, Any]:
    """Some of a model's tensors under the names of its checkpoint, in memory of their own."""
    from transformers.core_model_loading import revert_weight_conversion

    kept = {name: tensor.detach().to(getattr(torch, dtype)) for name, tensor in tensors}
    return {name: tensor.clone().contiguous() for name, tensor in revert_weight_conversion(model, kept).items()}


def write_version(tensors: dict[str, Any], folder: Path, version: int, file: str = "model.safetensors") -> str:

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return manifest.write(folder, version, manifest.specs(tensors.items()))


def flip_a_byte(folder: Path) -> None:
    """Damages a published version in a way that no header shows."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 0xFF
    path.write_bytes(content)


class Adapter(NamedTuple):
    """An adapter, and the adapted model for comparison."""

    model: Any
    config: AdapterConfig
    tensors: dict[str, Any]

    def publish(self, folder: Path, version: int) -> str:
        folder.mkdir(parents=True)
        (folder / manifest.ADAPTER_FILE).write_text(self.config.model_dump_json())
        return write_version(self.tensors, folder, version, "adapter_model.safetensors")


def make_adapter(base: Any, *, seed: int, rank: int = 4, targets: Sequence[str] = MATRICES) -> Adapter:
    """An adapter of the model whose every number depends on the seed."""
    import peft

    made = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=list(targets))
    model = randomize(peft.get_peft_model(copy.deepcopy(base), made), seed, "lora_")
    tensors = {name: tensor.contiguous() for name, tensor in peft.get_peft_model_state_dict(model).items()}
    settings: dict[str, Any] = {"r": rank, "lora_alpha": 2.0 * rank, "target_modules": sorted(targets)}
    return Adapter(model, AdapterConfig(base_model_name_or_path="base", **settings), tensors)


class MovingModel:
    """A model whose weights move a little with each step, and which exports and streams them as a trainer does."""

    def __init__(self, model: Any) -> None:

        self.model, self.said = copy.deepcopy(model), list[str]()
        self._generator = torch.Generator().manual_seed(1)

    def step(self) -> None:

        for parameter in self.model.parameters():
            moved = torch.rand(parameter.shape, generator=self._generator) < 0.02
            parameter.data.copy_(torch.where(moved, parameter.flip(0), parameter))

    def tensors(self) -> dict[str, Any]:
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def export(self, folder: Path) -> dict[str, TensorSpec]:

        save_file(self.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
        return manifest.specs(self.tensors().items())

    def stream(self, max_bytes: int, sink: Callable[..., None]) -> None:
        for item in self.tensors().items():
            sink([item])

    def deltas(self, *settings: str) -> Any:
        """The way of its versions to servers of which only the first is whole; `said` has what it complains of."""
        from hocket.extras.delta.write import DeltaWriter

        config = load(None, ["sync.backend=delta", *settings])
        versions = Versions(config.run_dir, self)  # type: ignore[arg-type]
        write = DeltaWriter(versions).write
        return DiskTransport(versions, config.sync_root, config.sync, self.said.append, write=write)


class Source:
    """Tensors as a trainer streams them from its memory: one bucket per `per_bucket` tensors."""

    def __init__(self, named: Any, *, adapter: Any = None, per_bucket: int = 4) -> None:

        named = list(named)
        self.adapter, self.device = adapter, torch.device("cpu")
        self.buckets = [named[i : i + per_bucket] for i in range(0, len(named), per_bucket)]
        self.layouts = [nccl.layout(bucket) for bucket in self.buckets]
        self.before: Callable[[int], None] = lambda number: None
        self.transport: Any = None  # while it is delivered

    @classmethod
    def of(cls, model: Any, *, per_bucket: int = 4) -> "Source":
        """The weights of a model, a tied head left out."""
        return cls(checkpoint(model, model.named_parameters(), "float32").items(), per_bucket=per_bucket)

    def layout(self, max_bytes: int, *, trained: bool = False) -> Any:
        return self.layouts

    def stream(self, max_bytes: int, sink: Callable[..., None], *, trained: bool = False) -> None:
        for number, bucket in enumerate(self.buckets, 1):
            self.before(number)
            sink(bucket)


def reference_logprobs(
    model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """log_softmax(logits / T) of each completion token, from transformers' own forward pass."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


def tolerance(model: Any, temperature: float = 1.0) -> float:
    """How far log-probs of a model in float32 may lie apart that two engines compute.

    On the way to a logit of a token are, in each layer, the sums of two norms, of q, k or v, of the scores, the softmax
    and the values of all positions, of o, up and down; then the last norm, the head and the softmax. The numbers that
    the head adds, whose norm is √hidden, come to no more than √hidden times the norm of a row of the head.
    """
    config = model.config.get_text_config()
    hidden, positions = config.hidden_size, config.max_position_embeddings
    layer = 6 * hidden + 2 * positions + config.intermediate_size
    additions = config.num_hidden_layers * layer + 2 * hidden + config.vocab_size
    summands = math.sqrt(hidden) * float(model.get_output_embeddings().weight.detach().norm(dim=1).max())
    return rounding(additions) * summands / temperature


def assert_sampled(
    model: Any, prompt: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float], temperature: float = 1.0
) -> None:
    """The log-probs are those of the model's tokens, but for rounding."""
    expected = reference_logprobs(model, prompt, token_ids, temperature)
    most = tolerance(model, temperature)
    assert all(abs(a - b) < most for a, b in zip(logprobs, expected, strict=True))


def make_llm() -> Any:
    """A fake AsyncLLM on a CPU, with what hocket reads from vLLM's configs."""
    model_config = {"get_vocab_size": lambda: MODEL_SIZES["vocab_size"], "max_model_len": 32, "dtype": "torch.float32"}
    return SimpleNamespace(
        errored=False,
        in_flight=0,
        model_config=SimpleNamespace(**model_config),
        vllm_config=SimpleNamespace(
            device_config=SimpleNamespace(device_type="cpu"),
            parallel_config=SimpleNamespace(world_size=1),
            cache_config=SimpleNamespace(num_gpu_blocks=4, block_size=16),
            lora_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=4),
        ),
    )


def make_sampler(tokenizer: Any = None) -> Any:
    """A sampler for 96 ids and 32 tokens, without an engine."""
    return Sampler(make_llm(), tokenizer or make_tokenizer(), lambda: None, {})


def vllm_text(tokenizer: Any, prompt: Sequence[int], params: Any) -> Any:
    """What makes the text of a request's tokens in vLLM."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    asked = SimpleNamespace(
        request_id="r", prompt_token_ids=[*prompt], sampling_params=params, prompt_embeds=None, mm_features=None
    )
    return IncrementalDetokenizer.from_new_request(tokenizer, asked)  # type: ignore[arg-type]


class SpeakingEngine:
    """In the place of `vllm_requests.complete`: samples given tokens, and makes their text as vLLM does."""

    def __init__(self, tokenizer: Any, *token_ids: int, eos: bool = False) -> None:
        self._tokenizer, self._eos = tokenizer, eos
        self.left = list(token_ids)

    async def __call__(self, llm: Any, prompt: Any, sampling: Any, seed: Any, request_id: str, begun: int) -> Any:
        params = vllm_requests.sampling_params(sampling, seed, begun)
        text = vllm_text(self._tokenizer, prompt, params)
        written = list[int]()
        finish, reason = "length", None
        while self.left and len(written) < sampling.max_tokens:
            token = self.left.pop(0)
            written.append(token)
            ends = token in sampling.stop_token_ids or (self._eos and not self.left)
            reason = text.update([token], ends) if params.detokenize else None
            if ends or reason:
                finish, reason = "stop", reason or (None if self._eos else token)
                break
        return SimpleNamespace(
            token_ids=written,
            text=text.get_next_output_text(True, False) if params.detokenize else "",
            finish_reason=finish,
            stop_reason=reason,
            logprobs=SimpleNamespace(logprobs=[-0.5] * len(written)),
            weight_versions=[SimpleNamespace(version="0", start=0, end=len(written))],
        )


def make_engine(llm: Any, *overrides: str) -> Any:
    """The real Engine on a fake AsyncLLM."""
    config = load(None, overrides)
    engine = Engine(
        llm,
        model=config.model.path,
        root=config.sync_root,
        timeout_s=config.sync.timeout_s,
        share_gpu=config.launch.share_gpu,
        template={},
    )
    wrap(engine)  # which brings the ways of the weights
    return engine


def idle_engine() -> Any:
    """An engine that must not be asked anything."""
    engine = Engine.__new__(Engine)
    engine.model, engine.require_ready = "m", lambda **how: None  # type: ignore[method-assign]
    engine.llm, engine.root, engine.sources = make_llm(), Path("/nowhere"), {}
    engine.share_gpu = False
    engine.sampler = SimpleNamespace(image_reader=None, placeholder=None)  # type: ignore[assignment]
    engine.health = fakes.health  # type: ignore[method-assign]
    return engine


def wrap(engine: Any, *routes: Any, token: str | None = None) -> Any:
    """The server around a fake engine, with these routes beside its own."""
    server = assemble(engine, host="127.0.0.1", token=token)
    server.app.router.routes.extend(routes)
    return server.guard


def asking(app: Any) -> httpx.AsyncClient:
    """A client of an app without a socket."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@contextlib.asynccontextmanager
async def listening(guard: Any, host: str = "127.0.0.1") -> AsyncIterator[int]:
    """Serves a guarded app on a socket of this machine, as a server of that host does; yields its port."""
    with main.bind("127.0.0.1", 0, None) as sock:
        server = main.http_server(guard, host)
        server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
        main.listen(sock)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        yield sock.getsockname()[1]
        server.should_exit = True
        await serving


def error_of(response: httpx.Response) -> tuple[int, str]:
    """Status and code of an error."""
    return response.status_code, response.json()["error"]["code"]
