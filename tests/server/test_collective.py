"""Weights straight from memory into a running server's engine: right to the last tensor, and never wedged by a failure.

The trainer's side is the real CollectiveTransport, fed from a transformers model.
"""

import asyncio
import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.server.test_adapters import adapters_come_and_are_used
from transformers.core_model_loading import revert_weight_conversion

from hocket import config as config_module
from hocket import weight_group
from hocket.client import ServerClient
from hocket.errors import HocketError
from hocket.protocol import ReloadResponse, TensorLayout
from hocket.sync.collective import CollectiveTransport
from hocket.sync.publish import Answer

pytestmark = pytest.mark.engine


class Source:
    """A model as the trainer streams it: names of its checkpoint, one bucket per `per_bucket` tensors."""

    adapter = None
    device = torch.device("cpu")

    def __init__(self, model: Any, *, dtype: str = "float32", per_bucket: int = 4) -> None:
        tensors = {name: p.detach().to(getattr(torch, dtype)) for name, p in model.named_parameters()}
        named = list(revert_weight_conversion(model, tensors).items())
        self.buckets = [named[i : i + per_bucket] for i in range(0, len(named), per_bucket)]
        self.before: Callable[[int], None] = lambda number: None

    def layout(self, max_bytes: int) -> list[list[TensorLayout]]:
        return [weight_group.layout(bucket) for bucket in self.buckets]

    def stream(self, max_bytes: int, sink: Callable[..., None]) -> None:
        for number, bucket in enumerate(self.buckets, 1):
            self.before(number)
            sink(bucket)


@contextlib.contextmanager
def transport(source: Any, *settings: str) -> Iterator[CollectiveTransport]:
    config = config_module.load(None, ["run.dir=runs/a", "sync.backend=nccl", "sync.timeout_s=90", *settings])
    made = CollectiveTransport(source, config.sync)
    try:
        yield made
    finally:
        made.close()


def send(server: Any, made: CollectiveTransport, version: int) -> Answer:
    """Returns the answer to a version; one that is loaded has the checksum of what was sent."""

    async def deliver() -> Answer:
        async with ServerClient(str(server.client.base_url).rstrip("/"), token=kit_token(server)) as client:
            ((checksum, answer),) = (await made.deliver(version, [client])).answers.values()
            assert isinstance(answer, HocketError) or (answer.version, answer.checksum) == (version, checksum)
            return answer

    return asyncio.run(deliver())


def kit_token(server: Any) -> str | None:
    authorization = server.client.headers.get("Authorization")
    return authorization.removeprefix("Bearer ") if authorization else None


def new_version(server: Any) -> int:
    version, server.next_version = server.next_version, server.next_version + 1
    return int(version)


@pytest.mark.parametrize("variant", ["tied float32", "untied float32", "tied bfloat16", "untied bfloat16"])
def test_after_an_update_every_log_prob_is_the_new_models(servers: Any, kit: Any, variant: str) -> None:
    head, dtype = variant.split()
    server = servers(variant)
    for seed in (300, 301):  # the second one through the group of the first
        old, new = server.model, kit.make_model(tied=head == "tied", seed=seed)
        source = Source(new, dtype=dtype)
        version = new_version(server)
        with transport(source) as made:
            answer = send(server, made, version)
        assert isinstance(answer, ReloadResponse), answer
        assert answer.num_tensors == (26 if head == "tied" else 27)
        assert server.health()["version"] == version
        gaps = server.gaps(model=new)
        exact = dtype == "float32"
        assert max(gaps) < (1e-4 if exact else 0.4)
        assert statistics.mean(gaps) < (1e-5 if exact else 0.04)
        assert statistics.mean(server.gaps(model=old)) > 0.3
        server.model = new


def test_experts_travel_under_the_names_of_their_checkpoint(servers: Any, kit: Any) -> None:
    server = servers("experts float32")
    new = kit.make_experts(seed=9)
    with transport(Source(new)) as made:
        answer = send(server, made, new_version(server))
    assert isinstance(answer, ReloadResponse), answer
    assert max(server.gaps(model=new)) < 1e-4
    server.model = new


def test_both_workers_of_a_tensor_parallel_engine_receive_adapters_and_after_a_failure_weights(
    servers: Any, kit: Any
) -> None:
    server = servers.take("parallel float32 lora")
    try:
        assert server.health()["workers"] == 2
        adapters_come_and_are_used(server, kit, "collective", number=1)
        lost = Source(kit.make_model(tied=True, seed=405))
        with transport(lost) as made:
            lost.before = lambda number: made.close() if number == 3 else None
            assert isinstance(send(server, made, new_version(server)), HocketError)
        server.wait_for(lambda health: health["status"] == "failed")
        old, new = server.model, kit.make_model(tied=True, seed=305)
        with transport(Source(new)) as made:
            answer = send(server, made, new_version(server))
        assert isinstance(answer, ReloadResponse), answer
        assert max(server.gaps(model=new)) < 1e-4
        assert statistics.mean(server.gaps(model=old)) > 0.3
        # By disk, too: each worker reads its part.
        server.publish_and_load(kit.make_model(tied=True, seed=307))
        assert max(server.gaps()) < 1e-4
    finally:
        server.stop()  # its workers never rest: tests after it would take twice as long


@pytest.mark.parametrize("in_flight", ["keep", "drain", "abort"])
def test_requests_in_flight_are_kept_drained_or_aborted(server: Any, kit: Any, in_flight: str) -> None:
    held, old, new = server.health()["version"], server.model, kit.make_model(tied=True, seed=310)
    version = new_version(server)
    n = 16 if in_flight == "drain" else 64
    asking = kit.asking(server, prompts=[[5, 6, 7, 8]], n=n, sampling={"max_tokens": 400})
    with asking as answers, transport(Source(new), f"sync.in_flight={in_flight}") as made:
        answer = send(server, made, version)
    assert isinstance(answer, ReloadResponse), answer
    server.model = new
    refused = {answer.json()["error"]["code"] for answer in answers if answer.status_code != 200}
    assert refused == ({"aborted"} if in_flight == "abort" else set())
    kit.assert_spans(answers, [5, 6, 7, 8], {held: old, version: new}, mixed=in_flight == "keep")
    assert max(server.gaps(model=new)) < 1e-4


def test_a_tensor_that_changes_on_its_way_is_named_and_the_next_update_heals(
    server: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = kit.make_model(tied=True, seed=320)
    source = Source(new)
    pack, packed = weight_group.pack, []

    def corrupt(named: Any, device: torch.device) -> Any:
        flat, specs = pack(named, device)
        packed.append(named[1][0])
        if len(packed) == 3:  # one bit of one number, in the third bucket
            first = named[0][1]
            flat[-(-first.nbytes // 16) * 16] ^= 1
        return flat, specs

    monkeypatch.setattr(weight_group, "pack", corrupt)
    with transport(source) as made:
        failure = send(server, made, new_version(server))
        assert isinstance(failure, HocketError)
        assert f"the bytes of tensor '{packed[2]}' changed on their way" in str(failure)
        assert server.health()["error"]["code"] == "reload_failed"
        assert server.client.post("/generate", json={"prompts": [[5]]}).status_code == 503
        monkeypatch.undo()
        version = new_version(server)
        assert isinstance(send(server, made, version), ReloadResponse)
    assert (server.health()["status"], server.health()["version"]) == ("ready", version)
    assert max(server.gaps(model=new)) < 1e-4
    server.model = new


def test_weights_of_another_model_are_refused_before_anything_is_touched(server: Any, kit: Any) -> None:
    before = server.health()
    with transport(Source(kit.make_model(tied=True, seed=1, vocab_size=128))) as made:
        failure = send(server, made, 5000)
    assert isinstance(failure, HocketError)
    assert "tensor 'model.embed_tokens.weight' has shape [128, 64], the model's is [96, 64]" in str(failure)
    assert server.health() == before
    assert max(server.gaps()) < 1e-4


@pytest.mark.parametrize("per_bucket", [3, 4])
def test_whatever_a_vanished_trainer_leaves_half_loaded_the_next_update_is_whole(
    server: Any, kit: Any, per_bucket: int
) -> None:
    # vLLM collects a layer's tensors until all are there, and would go on with those of the update that broke.
    for cut in range(2, 8):
        lost = Source(kit.make_model(tied=True, seed=330 + cut), per_bucket=per_bucket)
        with transport(lost) as made:

            def vanish(number: int, cut: int = cut, made: CollectiveTransport = made) -> None:
                if number == cut:
                    made.close()  # as the kernel closes a killed trainer's connections

            lost.before = vanish
            assert isinstance(send(server, made, new_version(server)), HocketError)
        server.wait_for(lambda health: health["status"] == "failed")
        new = kit.make_model(tied=True, seed=340 + cut)
        with transport(Source(new)) as made:
            answer = send(server, made, new_version(server))
            assert isinstance(answer, ReloadResponse), answer
        assert max(server.gaps(model=new)) < 1e-4
        server.model = new


def test_an_engine_that_stops_answering_is_named_at_the_deadline(servers: Any, kit: Any) -> None:
    server = servers.take("tied float32 lora")  # which no later test needs
    engine = server.engine()
    try:
        source = Source(kit.make_model(tied=True, seed=340))
        source.before = lambda number: engine.send_signal(signal.SIGSTOP) if number == 3 else None
        with transport(source, "sync.timeout_s=3") as made:
            start = time.monotonic()
            failure = send(server, made, new_version(server))
            assert time.monotonic() - start < 20
        assert "did not finish" in str(failure)
        assert "in 3 s" in str(failure)
    finally:
        engine.send_signal(signal.SIGCONT)
        server.stop()


def test_joining_twice_does_no_harm(server: Any) -> None:
    answers = []
    with transport(Source(server.model)) as made:
        for version in (new_version(server), new_version(server)):
            made.close()  # as a trainer that was started again: a group of its own each time
            answers.append(send(server, made, version))
    assert [type(answer) for answer in answers] == [ReloadResponse, ReloadResponse]
