"""Tiny random Qwen2 models, published versions of them, and real servers in processes of their own."""

import asyncio
import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import pytest
from fastapi import FastAPI

from hocket.protocol import AgentRecord
from support import fakes
from support.processes import Process, free_port, wait_for

SOURCE = Path(__file__).resolve().parents[2] / "src"
VOCAB_SIZE = 96
MAX_LENGTH = 512
TOKEN = "correct-horse"
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m['role'] }}:{{ m['content'] }};"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer() -> Any:
    """Characters 33 to 122 as ids 3 to 92, besides three special ones; smaller than the model's vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {chr(33 + i): 3 + i for i in range(90)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    return fast


SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "intermediate_size": 128}


def make_model(*, tied: bool, seed: int, **sizes: int) -> Any:
    """A Qwen2 model whose every weight depends on the seed."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    sizes = SIZES | {"max_position_embeddings": MAX_LENGTH} | sizes
    return randomize(Qwen2ForCausalLM(Qwen2Config(**sizes, **special, tie_word_embeddings=tied)), seed)


def make_experts(*, seed: int) -> Any:
    """A Qwen3-MoE model whose every weight depends on the seed."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = SIZES | {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": MAX_LENGTH}
    return randomize(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **special)), seed)


def randomize(model: Any, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            parameter.copy_(mean + 0.15 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def publish(model: Any, folder: Path, version: int, *, dtype: str = "float32", drop: Sequence[str] = ()) -> str:
    """Writes a published version as the trainer does; returns its checksum."""
    import torch
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    from hocket.protocol import manifest

    folder.mkdir(parents=True)
    tensors = {
        name: tensor.detach().to(getattr(torch, dtype)).clone().contiguous()
        for name, tensor in revert_weight_conversion(model, model.state_dict()).items()
        if name not in drop
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return manifest.write(folder, version, manifest.specs(tensors.items()))


def flip_a_byte(folder: Path) -> None:
    """Damages a published version in a way that no header shows."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 0xFF
    path.write_bytes(content)


def reference_logprobs(
    model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """log_softmax(logits / T) of each completion token, from transformers' own forward pass."""
    import torch

    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


def make_llm() -> Any:
    """A fake AsyncLLM on a CPU, with what hocket reads from vLLM's configs."""
    return SimpleNamespace(
        errored=False,
        in_flight=0,
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB_SIZE, max_model_len=32, dtype="torch.float32"),
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
    from hocket.server.generate import Sampler

    return Sampler(make_llm(), tokenizer or make_tokenizer(), lambda: None, {})


def make_engine(llm: Any, *overrides: str) -> Any:
    """The real Engine on a fake AsyncLLM."""
    from hocket.config import load
    from hocket.server.engine import Engine

    config = load(None, overrides)
    engine = Engine(
        llm,
        model=config.model.path,
        root=config.sync_root,
        timeout_s=config.sync.timeout_s,
        share_gpu=config.launch.share_gpu,
        template={},
    )
    wrap(FastAPI(), engine)  # which brings the ways of the weights
    return engine


def idle_engine() -> Any:
    """An engine that must not be asked anything."""
    from hocket.server.engine import Engine

    engine = Engine.__new__(Engine)
    engine.model, engine.require_ready = "m", lambda **how: None  # type: ignore[method-assign]
    engine.llm, engine.root, engine.sources = make_llm(), Path("/nowhere"), {}
    engine.sampler = SimpleNamespace(eyes=None, placeholder=None)  # type: ignore[assignment]
    engine.health = fakes.health  # type: ignore[method-assign]
    return engine


def wrap(app: Any, engine: Any, *, token: str | None = None) -> Any:
    """The whole app around a fake engine."""
    from hocket.server.app import assemble

    return assemble(app, engine, host="127.0.0.1", token=token)


class Server(Process):
    """A running server of a model, which it saves in its folder."""

    forked = True
    starts_engine = True

    def __init__(
        self,
        folder: Path,
        model: Any,
        *overrides: str,
        token: str = "",
        program: Sequence[str] = ("run.py",),
        tokenizer: Any = None,  # or a processor
    ) -> None:
        self.model, self.root, self.next_version = model, folder / "runs", 1
        model.save_pretrained(folder / "model")
        (tokenizer or make_tokenizer()).save_pretrained(folder / "model")
        self.root.mkdir()
        settings = {"model.path": folder / "model", "run.dir": self.root / "a", "server.port": (port := free_port())}
        settings |= {"rollout.max_tokens": 16, "server.kv_cache_mib": 64}
        command = ["serve", *(f"{key}={value}" for key, value in settings.items()), *overrides]
        super().__init__(command, folder / "log", program=program, PYTHONPATH=str(SOURCE), HOCKET_TOKEN=token)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, headers=headers)
        try:
            self.wait_for(lambda: "ready on" in self.output(), "the server is ready")
        except BaseException:
            self.__exit__()
            raise

    def generate(self, **body: Any) -> dict[str, Any]:
        response = self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def health(self) -> dict[str, Any]:
        return dict(self.client.get("/health").json())

    def wait_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        found = wait_for(lambda: condition(health := self.health()) and health, "the server's state", 60, 0.005)
        return dict(found)

    def reload(self, version: int, name: str, **how: Any) -> httpx.Response:
        source = {"kind": "disk", "name": name}
        return self.client.post("/reload_weights", json={"version": version, "source": source, **how})

    def assert_compares(self, version: int, name: str) -> None:
        """The model is what was published, and a comparison changes no bit of what it computes."""
        before = self.seeded()
        response = self.reload(version, name, compare=True)
        assert response.status_code == 200, response.text
        assert response.json()["version"] == version
        assert self.seeded() == before

    def seeded(self) -> Any:
        """Tokens and log-probs that depend on nothing but the weights."""
        answer = self.generate(prompts=[[5, 6, 7, 8]], n=2, sampling={"max_tokens": 32, "seed": 7})
        return [(done["token_ids"], done["logprobs"]) for done in answer["completions"][0]]

    def publish_and_load(self, model: Any, **how: Any) -> dict[str, Any]:
        """Publishes a model as the next version, loads it and makes it the reference."""
        version = self.new_version()
        checksum = publish(model, self.root / f"v{version:06d}", version, **how)
        response = self.reload(version, f"v{version:06d}")
        assert response.status_code == 200, response.text
        answer = dict(response.json())
        assert (answer["version"], answer["checksum"]) == (version, checksum)
        self.model = model
        return answer

    def gaps(self, *, temperature: float = 1.0, model: Any = None, prompt: Sequence[int] = (5, 6, 7, 8)) -> list[float]:
        """|Δ log-prob| between the server and transformers over tokens sampled alike each time."""
        sampling = {"max_tokens": 48, "temperature": temperature, "seed": 1}
        answer = self.generate(prompts=[list(prompt)], n=4, sampling=sampling)
        gaps = []
        for done in answer["completions"][0]:
            expected = reference_logprobs(model or self.model, prompt, done["token_ids"], temperature)
            gaps += [abs(a - b) for a, b in zip(done["logprobs"], expected, strict=True)]
        return gaps

    def children(self) -> list[psutil.Process]:
        return self.members()[1:]

    def engine(self) -> psutil.Process:
        """The engine's process: it is forked from one that the server has started, or started by the server itself."""
        return next(child for child in self.children() if child.ppid() != self.popen.pid or "Engine" in child.name())

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 60) -> int:
        self.client.close()
        self.popen.send_signal(number)
        return self.popen.wait(timeout_s)

    def open_session(self, *, max_length: int = MAX_LENGTH, max_calls: int = 2, **sampling: Any) -> Any:
        """Returns the id of a new session, and an `openai` client of it."""
        request = {"sampling": sampling, "max_length": max_length, "max_calls": max_calls, "idle_timeout_s": 60}
        session_id = self.client.post("/sessions", json=request).json()["id"]
        url = f"{self.client.base_url}/sessions/{session_id}/v1"
        return session_id, openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=120)

    def record_of(self, session_id: str, method: str = "GET") -> AgentRecord:
        return AgentRecord.model_validate_json(self.client.request(method, f"/sessions/{session_id}").content)

    def new_version(self) -> int:
        self.next_version += 1
        return self.next_version - 1

    def metric(self, name: str) -> float:
        """One of vLLM's own metrics, summed over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{")]
        assert found, f"vLLM has no metric {name} any more"
        return sum(found)

    def deliver(self, source: "Source", *settings: str, compare: bool = False) -> Any:
        """Sends a model's tensors, or an adapter's, as the trainer does from its memory, and compares them if asked."""
        from hocket import config
        from hocket.client.server import ServerClient
        from hocket.sync.collective import CollectiveTransport

        sync = config.load(None, ["run.dir=runs/a", "sync.backend=nccl", "sync.timeout_s=90", *settings]).sync
        token = self.client.headers.get("Authorization", "").removeprefix("Bearer ") or None

        async def deliver() -> Any:
            async with ServerClient(str(self.client.base_url).rstrip("/"), token=token) as client:
                with contextlib.closing(CollectiveTransport(source, sync)) as source.transport:
                    delivery = await source.transport.deliver(self.new_version(), [client])
                    if not compare:
                        return delivery
                    return await source.transport.deliver(self.next_version - 1, [client], compare=True)

        return asyncio.run(deliver())

    def in_flight(self, **body: Any) -> Future[httpx.Response]:
        """Sends so much work that some is in flight for many times as long as any test takes to do something next."""
        work = {"prompts": [[5, 6, 7, 8]] * 8, "n": 128, "sampling": {"max_tokens": 400}} | body
        send = functools.partial(self.client.post, "/generate", json=work)
        for _ in range(50):  # less work may have ended before anybody has looked
            answer: Future[httpx.Response] = Future()
            threading.Thread(target=lambda to=answer: to.set_result(send()), daemon=True).start()
            wait_for(lambda ended=answer.done: ended() or self.health()["in_flight"] > 0, "a request", 60, poll_s=0.002)
            if not answer.done():
                return answer
        raise AssertionError("every request had ended before it was seen in flight")


class Source:
    """Tensors as a trainer streams them from its memory: one bucket per `per_bucket` tensors."""

    def __init__(self, named: Any, *, adapter: Any = None, per_bucket: int = 4) -> None:
        import torch

        from hocket.protocol import weight_group

        named = list(named)
        self.adapter, self.device = adapter, torch.device("cpu")
        self.buckets = [named[i : i + per_bucket] for i in range(0, len(named), per_bucket)]
        self.layouts = [weight_group.layout(bucket) for bucket in self.buckets]
        self.before: Callable[[int], None] = lambda number: None
        self.transport: Any = None  # while it is delivered

    @classmethod
    def of(cls, model: Any, *, dtype: str = "float32", per_bucket: int = 4) -> "Source":
        """The weights of a model, under the names of its checkpoint."""
        import torch
        from transformers.core_model_loading import revert_weight_conversion

        tensors = {name: p.detach().to(getattr(torch, dtype)) for name, p in model.named_parameters()}
        return cls(revert_weight_conversion(model, tensors).items(), per_bucket=per_bucket)

    def layout(self, max_bytes: int) -> Any:
        return self.layouts

    def stream(self, max_bytes: int, sink: Callable[..., None]) -> None:
        for number, bucket in enumerate(self.buckets, 1):
            self.before(number)
            sink(bucket)


def load_amid_requests(server: Server, old: Any, load: Callable[[int], Any], *, in_flight: str = "keep") -> None:
    """Loads weights, which `load` makes of a seed, amid requests; checks that the model of its version gave each token.

    It loads again where all requests had ended when the weights came, as on a busy machine.
    """
    prompt = [5, 6, 7, 8]
    for seed in range(600, 608):
        held, answers, done = server.health()["version"], list[httpx.Response](), threading.Event()

        def ask(answers: list[httpx.Response] = answers, done: threading.Event = done) -> None:
            body = {"prompts": [prompt], "n": 16 if in_flight == "drain" else 64, "sampling": {"max_tokens": 400}}
            while not done.is_set():
                answers.append(server.client.post("/generate", json=body))

        with ThreadPoolExecutor(2) as threads:
            try:
                asking = [threads.submit(ask) for _ in range(2)]
                server.wait_until(lambda health: health["in_flight"] > 0)
                new = load(seed)
            finally:
                done.set()
        assert [one.result() for one in asking] == [None, None]
        models = {held: old, server.health()["version"]: new}
        codes = {answer.json()["error"]["code"] for answer in answers if answer.status_code != 200}
        assert codes <= ({"aborted"} if in_flight == "abort" else set())
        both = check_spans([answer for answer in answers if answer.status_code == 200], prompt, models)
        assert in_flight == "keep" or not both
        if both or codes or in_flight == "drain":
            return
        old = new
    pytest.fail("no request was ever in flight when new weights came")


def check_spans(answers: Sequence[httpx.Response], prompt: Sequence[int], models: dict[int, Any]) -> int:
    """Checks that each token was sampled by the model of its version; returns how many completions have both."""
    done = [one for answer in answers for one in answer.json()["completions"][0]]
    for completion in done:
        spans = completion["versions"]
        assert [span[0] for span in spans] in ([[number] for number in models] + [list(models)])
        assert [span[1] for span in spans] == [0, *(span[2] for span in spans[:-1])]
        assert spans[-1][2] == len(completion["token_ids"])
    both = [completion for completion in done if len(completion["versions"]) == 2]
    for completion in [*both[:4], *done[:1], *done[-1:]]:
        for number, start, end in completion["versions"]:
            expected = reference_logprobs(models[number], prompt, completion["token_ids"])[start:end]
            # Had the old weights' keys and values survived the reload, the second part would be off.
            assert completion["logprobs"][start:end] == pytest.approx(expected, abs=1e-4)
    return len(both)


class Servers:
    """Servers by name, "tied float32", each started at its first use and shared by all tests.

    "untied" ones want a token, "experts" has a mixture-of-experts model, "parallel" splits a tied model between two
    workers; a third word "lora" is for adapters. "tied float32" may sleep.
    """

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self.running: dict[str, Server] = {}

    def __call__(self, name: str) -> Server:
        if name not in self.running:
            head, dtype, *lora = name.split()
            folder = self._factory.mktemp(name.replace(" ", "-"))
            overrides = [f"model.dtype={dtype}", *(["model.lora.rank=8"] if lora else [])]
            if head == "parallel":
                overrides.append("server.tensor_parallel_size=2")
            if name == "tied float32":
                overrides.append("launch.share_gpu=true")
            model = make_experts(seed=0) if head == "experts" else make_model(tied=head != "untied", seed=0)
            token = TOKEN if head == "untied" else ""
            self.running[name] = Server(folder, model, *overrides, token=token)
        return self.running[name]

    def take(self, name: str) -> Server:
        """Returns a server for a test that will end it."""
        self(name)
        return self.running.pop(name)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The servers of this session, ended with it."""
    servers = Servers(tmp_path_factory)
    yield servers
    for server in servers.running.values():
        server.stop()


@pytest.fixture
def server(servers: Servers) -> Server:
    """The server most tests use: tied head, float32."""
    return servers("tied float32")


@pytest.fixture(scope="session")
def kit() -> Any:
    """The helper functions of this file, as test modules can't import it."""
    return sys.modules[__name__]
