"""Sessions of a real server whose KV cache holds four of the longest sequences: most calls wait, or are preempted."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from support.engines import assert_sampled, make_model, publish
from support.tiny_server import MAX_LENGTH, TinyServer

pytestmark = [pytest.mark.engine, pytest.mark.long]

TOKENS = 180
SAMPLING = {"max_tokens": TOKENS, "temperature": 0.9}
ENDLESS: dict[str, Any] = {"model": "x", "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
SIZES = {"hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    model = make_model(seed=0, **SIZES)
    server = TinyServer(tmp_path_factory.mktemp("crowded"), model, "server.kv_cache_mib=16")
    assert server.health()["kv_tokens"] == 4 * MAX_LENGTH  # of 2 · 2 layers · 512 · 4 bytes
    yield server
    server.stop()


def streamed(client: openai.OpenAI, prompt: list[int], told: list[str], begun: threading.Event) -> bool:
    """Adds the pieces of an answer to `told` as they come; returns False where new weights have broken it off."""
    try:
        with client.completions.create(prompt=prompt, stream=True, **ENDLESS) as stream:
            for chunk in stream:
                told.append(chunk.choices[0].text)
                begun.set()
    except openai.APIError as error:
        if "what was streamed can't be taken back: set sync.in_flight=keep" not in str(error):
            raise
        return False
    return True


def check(models: dict[int, Any], calls: list[Any], texts: list[str]) -> list[int]:
    """Checks that these and no others were recorded, each as one version's policy gave it; returns the versions."""
    assert [call.completion.text for call in calls] == texts
    for call in calls:
        done = call.completion
        ((version, *span),) = done.versions
        assert span == [0, len(done.token_ids)]
        assert_sampled(models[version], call.prompt_token_ids, done.token_ids, done.logprobs, 0.9)
    return [call.completion.versions[0][0] for call in calls]


def test_calls_that_were_preempted_all_end_and_are_recorded_as_they_were_sampled(server: TinyServer) -> None:
    def plays(number: int) -> tuple[list[Any], list[str]]:
        session_id, client = server.open_session(**SAMPLING)
        prompt, told = [5 + number, *range(3, 93), 8], list[str]()
        with client:
            if number % 2:
                assert streamed(client, prompt, told, threading.Event())
            else:
                told.append(client.completions.create(prompt=prompt, **ENDLESS).choices[0].text)
        return server.record_of(session_id, "DELETE").calls, ["".join(told)]

    def load() -> tuple[int, float]:
        """Returns the most calls that waited, and the largest share of the KV cache, until all have ended."""
        most = 0, 0.0
        while not ended.is_set():
            health = server.health()
            most = max(most[0], health["waiting"]), max(most[1], health["kv_use"])
            ended.wait(0.02)
        return most

    ended = threading.Event()
    watching = ThreadPoolExecutor(1).submit(load)
    before = server.metric("num_preemptions_total")
    for _ in range(5):  # calls that come one after the other, as threads may have it, find room
        with ThreadPoolExecutor(12) as threads:  # of the 16 blocks of 128 tokens each takes one, and then two more
            played = list(threads.map(plays, range(12)))
        if server.metric("num_preemptions_total") > before:
            break
    ended.set()
    assert server.metric("num_preemptions_total") > before
    waiting, kv_use = watching.result()
    assert waiting > 0
    assert 0.5 < kv_use <= 1
    for calls, texts in played:
        check({server.next_version - 1: server.model}, calls, texts)
        assert len(calls[0].completion.token_ids) == TOKENS


def reloaded_amid_calls(server: TinyServer) -> tuple[list[int], list[list[int]]]:
    """Loads new weights while three whole answers and six streams are sampled; returns the versions recorded of each.

    A call that has ended before may be the old version's. All others: a stream of which some was told has no record,
    everything else is the new version's alone.
    """
    version = server.new_version()
    models = {version - 1: server.model, version: make_model(seed=version, **SIZES)}
    publish(models[version], server.root / f"v{version:06d}", version)
    # Two blocks of 128 tokens from the start, as none is that of another prompt: seven calls run at most.
    prompts = [[3 + number, *range(3, 93), *range(3, 43)] for number in range(9)]
    sessions = [server.open_session(**SAMPLING) for _ in prompts]
    begun, told = threading.Event(), [list[str]() for _ in range(6)]
    with ThreadPoolExecutor(9) as threads:
        wholes = [
            threads.submit(client.completions.create, prompt=prompt, **ENDLESS)
            for prompt, (_, client) in zip(prompts[:3], sessions, strict=False)
        ]
        streams = [
            threads.submit(streamed, client, prompt, pieces, begun)
            for prompt, (_, client), pieces in zip(prompts[3:], sessions[3:], told, strict=True)
        ]
        assert begun.wait(60)
        assert server.reload(version, in_flight="abort").status_code == 200
        texts = [[whole.result().choices[0].text] for whole in wholes]
        texts += [["".join(pieces)] if stream.result() else [] for stream, pieces in zip(streams, told, strict=True)]
    assert all(told)
    server.model = models[version]
    versions = []
    for (session_id, client), answer in zip(sessions, texts, strict=True):
        client.close()
        versions.append(check(models, server.record_of(session_id, "DELETE").calls, answer))
    return [one for (one,) in versions[:3]], versions[3:]


def test_new_weights_end_only_streams_of_which_some_was_told_and_all_others_begin_again(server: TinyServer) -> None:
    for _ in range(8):  # on a busy machine calls may have ended before the new weights have come, or begin after that
        wholes, streams = reloaded_amid_calls(server)
        new = server.next_version - 1
        if set(wholes) == {new} and [] in streams and [new] in streams:
            return
    pytest.fail(f"new weights never came amid calls; the last time: {wholes}, {streams} with version {new}")


@pytest.mark.parametrize("leaves", [True, False])
def test_nothing_more_is_sampled_for_a_lost_agent_or_a_closed_session(server: TinyServer, leaves: bool) -> None:
    for _ in range(8):  # on a busy machine all may have been sampled before anybody has looked
        before, error = server.metric("generation_tokens_total"), ""
        session_id, client = server.open_session(**SAMPLING)
        with client:
            stream = client.completions.create(prompt=[9], stream=True, **ENDLESS)
            chunks = iter(stream)
            next(chunks)
            if leaves:
                stream.close()
            else:
                (call,) = server.record_of(session_id, "DELETE").calls
                try:
                    list(chunks)
                except openai.APIError as raised:
                    error = str(raised)
        server.generate(prompts=[[5]], sampling={"max_tokens": 2})  # the engine counts when it works
        server.wait_until(lambda _: server.metric("num_requests_running") == 0)
        if leaves:
            (call,) = server.record_of(session_id, "DELETE").calls
        sampled = server.metric("generation_tokens_total") - before - 2
        if call.completion is None and sampled < TOKENS:
            break
    assert call.completion is None
    assert leaves or "the session was closed, which ends its calls" in error
    assert sampled < TOKENS
