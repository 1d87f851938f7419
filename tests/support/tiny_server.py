"""Real servers of tiny models in processes of their own, and what tests do with them again and again."""

import asyncio
import contextlib
import functools
import signal
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from hocket.client.server import ServerClient
from hocket.config import load
from hocket.protocol import AgentRecord, ReloadResponse
from hocket.sync.nccl import CollectiveTransport
from support.engines import (
    MATRICES,
    MODEL_SIZES,
    Adapter,
    Source,
    assert_sampled,
    error_of,
    make_adapter,
    make_experts,
    make_model,
    make_tokenizer,
    publish,
    reference_logprobs,
    tolerance,
)
from support.processes import ROOT, Process, free_port, wait_for

MAX_LENGTH = MODEL_SIZES["max_position_embeddings"]
TOKEN = "correct-horse"
PROMPT = (5, 6, 7, 8)
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
"""What the engine makes one matrix of."""


class TinyServer(Process):
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
        **environment: str,
    ) -> None:
        self.model, self.root, self.next_version = model, folder / "runs", 1
        model.save_pretrained(folder / "model")
        (tokenizer or make_tokenizer()).save_pretrained(folder / "model")
        self.root.mkdir()
        settings = {"model.path": folder / "model", "run.dir": self.root / "a", "server.port": (port := free_port())}
        settings |= {"rollout.max_tokens": 16, "server.kv_cache_mib": 64}
        command = ["serve", *(f"{key}={value}" for key, value in settings.items()), *overrides]
        environment |= {"PYTHONPATH": f"{ROOT}/src", "HOCKET_TOKEN": token}
        super().__init__(command, folder / "log", program=program, **environment)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, headers=headers)
        try:
            self.wait_for(lambda: "ready on" in self.output(), "the server is ready")
        except BaseException:
            self.__exit__()
            raise

    def trainer_client(self) -> ServerClient:
        """What a trainer speaks to it with."""
        token = self.client.headers.get("Authorization", "").removeprefix("Bearer ") or None
        return ServerClient(str(self.client.base_url).rstrip("/"), token=token)

    def generate(self, **body: Any) -> dict[str, Any]:
        response = self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def health(self) -> dict[str, Any]:
        return dict(self.client.get("/health").json())

    def wait_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        found = wait_for(lambda: condition(health := self.health()) and health, "the server's state", 60, 0.005)
        return dict(found)

    def metric(self, name: str) -> float:
        """One of vLLM's own metrics, summed over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{")]
        assert found, f"vLLM has no metric {name} any more"
        return sum(found)

    def new_version(self) -> int:
        self.next_version += 1
        return self.next_version - 1

    def reload(self, version: int, name: str = "", **how: Any) -> httpx.Response:
        """Asks it for a version, which has the usual name unless another one is given."""
        source = {"kind": "disk", "name": name or f"v{version:06d}"}
        return self.client.post("/reload_weights", json={"version": version, "source": source, **how})

    def load(self, write: Callable[[Path, int], str]) -> ReloadResponse:
        """Has `write` publish the next version, and loads it."""
        version = self.new_version()
        checksum = write(self.root / f"v{version:06d}", version)
        response = self.reload(version)
        assert response.status_code == 200, response.text
        answer = ReloadResponse.model_validate(response.json())
        assert (answer.version, answer.checksum) == (version, checksum)
        return answer

    def publish_and_load(self, model: Any, **how: Any) -> ReloadResponse:
        """Publishes a model as the next version, loads it and makes it the reference."""
        answer = self.load(functools.partial(publish, model, **how))
        self.model = model
        return answer

    def load_adapter(self, adapter: Adapter) -> ReloadResponse:
        answer = self.load(adapter.publish)
        assert self.reload(answer.version).json() == answer.model_dump()  # held already: nothing was loaded
        self.assert_compares(answer.version)
        return answer

    def assert_compares(self, version: int, name: str = "") -> None:
        """The model is what was published, and a comparison changes no bit of what it computes."""
        before = self.seeded()
        response = self.reload(version, name, compare=True)
        assert response.status_code == 200, response.text
        assert response.json()["version"] == version
        assert self.seeded() == before

    def seeded(self) -> Any:
        """Tokens and log-probs that depend on nothing but the weights."""
        answer = self.generate(prompts=[list(PROMPT)], n=2, sampling={"max_tokens": 32, "seed": 7})
        return [(done["token_ids"], done["logprobs"]) for done in answer["completions"][0]]

    def gaps(self, model: Any, temperature: float = 1.0, prompt: Sequence[int] = PROMPT) -> list[float]:
        """|Δ log-prob| between the server and transformers over tokens sampled alike each time."""
        sampling = {"max_tokens": 48, "temperature": temperature, "seed": 1}
        answer = self.generate(prompts=[list(prompt)], n=4, sampling=sampling)
        gaps = []
        for done in answer["completions"][0]:
            expected = reference_logprobs(model, prompt, done["token_ids"], temperature)
            gaps += [abs(a - b) for a, b in zip(done["logprobs"], expected, strict=True)]
        return gaps

    def assert_is(
        self, model: Any = None, *, temperatures: Sequence[float] = (1.0,), prompt: Sequence[int] = PROMPT
    ) -> None:
        """Samples from the model's distribution, but for rounding: from its own's, if none is given."""
        model = model or self.model
        for temperature in temperatures:
            gaps = self.gaps(model, temperature, prompt)
            if self.health()["dtype"] == "float32":
                assert max(gaps) < tolerance(model, temperature)
            else:
                # bfloat16 rounds each of 13 numbers in each of two layers, and two behind them, by 2^-8 of itself. By
                # chance: √28 · 2^-8 = 0.02 of a logit whose 64 summands have a root mean square of 0.15, their sum 1.2,
                # and as much of what it is divided by.
                assert statistics.mean(gaps) < 0.02 * 1.2 * 2**0.5 / temperature
                assert max(gaps) < 8 * 0.02 * 1.2 * 2**0.5 / temperature

    def assert_is_not(self, model: Any, *, by: float = 0.3) -> None:
        """Is another model: its log-probs lie `by` apart in the mean, some hundred times rounding."""
        assert statistics.mean(self.gaps(model)) > by

    def assert_openai_is(self, model: Any) -> None:
        """The routes of vLLM sample from the model's distribution, too."""
        prompt = [5, 6, 7]
        body = {"model": self.health()["model"], "prompt": prompt, "max_tokens": 48, "logprobs": 0, "n": 2}
        answer = self.client.post("/v1/completions", json={**body, "return_token_ids": True}).json()
        for choice in answer["choices"]:
            assert_sampled(model, prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])

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

    def deliver(self, source: Source, *settings: str, compare: bool = False) -> Any:
        """Sends a model's tensors, or an adapter's, as the trainer does from its memory, and compares them if asked."""
        sync = load(None, ["run.dir=runs/a", "sync.backend=nccl", "sync.timeout_s=90", *settings]).sync

        async def deliver() -> Any:
            async with self.trainer_client() as client:
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


class Altering(TinyServer):
    """A server that alters a tensor on its way into the model."""

    def __init__(self, folder: Path, model: Any, *overrides: str, tokenizer: Any = None) -> None:
        self.file, self.loads = folder / "alter", 0
        self.file.touch()
        program = (f"{ROOT}/tests/server/altering.py",)
        super().__init__(folder, model, *overrides, program=program, tokenizer=tokenizer, ALTER=str(self.file))

    def load_altered(self, version: int, name: str, how: str) -> httpx.Response:
        """Loads the version, held or not: under another name it is another one."""
        self.file.write_text(f"{name} {how}")
        self.loads += 1
        folder = self.root / f"v{version:06d}"
        folder.with_name(f"again{self.loads}").symlink_to(folder)
        return self.reload(version, f"again{self.loads}")

    def find(self, version: int, name: str, how: str, *, found_by: str) -> None:
        """Loads the version with the tensor altered: it is found out, by name, and what comes next mends it."""
        response = self.load_altered(version, name, how)
        if found_by == "comparison":
            assert (response.status_code, response.json()["version"]) == (200, version)
            response = self.reload(version, compare=True)
        assert error_of(response) == ((409, "not_held") if found_by == "comparison" else (500, "reload_failed")), name
        layer = ".".join(FUSED.get(part, part) for part in name.removeprefix("base_model.model.").split(".")[:-1])
        said = response.json()["error"]["message"]
        assert layer.removesuffix(".lora_A").removesuffix(".lora_B") in said
        error = self.health()["error"]
        assert (error["code"], error["message"]) == ("reload_failed", said)
        assert error_of(self.client.post("/generate", json={"prompts": [[5]]})) == (503, "reload_failed")

    def assert_holds(self, version: int) -> None:
        """Loads the version as it is: the comparison finds nothing, and later tokens are the same to the last bit."""
        answer = self.load_altered(version, "", "")
        assert answer.status_code == 200, answer.text
        self.assert_compares(version)


def load_amid_requests(server: TinyServer, old: Any, load: Callable[[int], Any], *, in_flight: str = "keep") -> None:
    """Loads weights, which `load` makes of a seed, amid requests; checks that the model of its version gave each token.

    It loads again where all requests had ended when the weights came, as on a busy machine.
    """
    for seed in range(600, 608):
        held, answers, done = server.health()["version"], list[httpx.Response](), threading.Event()

        def ask(answers: list[httpx.Response] = answers, done: threading.Event = done) -> None:
            body = {"prompts": [PROMPT], "n": 16 if in_flight == "drain" else 64, "sampling": {"max_tokens": 400}}
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
        both = check_spans([answer for answer in answers if answer.status_code == 200], models)
        assert in_flight == "keep" or not both
        if both or codes or in_flight == "drain":
            return
        old = new
    pytest.fail("no request was ever in flight when new weights came")


def check_spans(answers: Sequence[httpx.Response], models: dict[int, Any]) -> int:
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
            # Had the old weights' keys and values survived the reload, the second part would be off.
            before, tokens = completion["token_ids"][:start], completion["token_ids"][start:end]
            assert_sampled(models[number], [*PROMPT, *before], tokens, completion["logprobs"][start:end])
    return len(both)


def adapters_come_and_are_used(server: TinyServer, load: Callable[[Adapter], ReloadResponse]) -> None:
    """Loads two adapters, one of all matrices and one of two, and checks that all samples are of the last one."""
    if server.health()["version"] == 0:  # no adapter has come
        server.assert_is()
        server.assert_openai_is(server.model)
    others = [server.model]
    for seed, targets in ((1, MATRICES), (2, ("q_proj", "down_proj"))):
        adapter = make_adapter(server.model, seed=seed, targets=targets)
        answer = load(adapter)
        assert answer.num_tensors == 2 * 2 * len(targets)
        assert server.health()["version"] == answer.version
        server.assert_is(adapter.model, temperatures=(1.0, 0.7))
        server.assert_openai_is(adapter.model)
        for other in others:
            server.assert_is_not(other, by=0.1)
        others.append(adapter.model)


class Servers:
    """Servers by name, "tied float32", each started at its first use and shared by all tests.

    "untied" ones want a token, "experts" has a mixture-of-experts model, "parallel" splits a tied model between two
    workers; a third word "lora" is for adapters. "tied float32" may sleep.
    """

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self.running: dict[str, TinyServer] = {}

    def __call__(self, name: str) -> TinyServer:
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
            self.running[name] = TinyServer(folder, model, *overrides, token=token)
        return self.running[name]

    def take(self, name: str) -> TinyServer:
        """Returns a server for a test that will end it."""
        self(name)
        return self.running.pop(name)

    def stop(self) -> None:
        while self.running:
            self.running.popitem()[1].stop()


SHARED = pytest.StashKey[Servers]()
"""Where a session keeps its servers."""
