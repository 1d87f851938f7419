"""The reference policy against transformers' own log-probs, wherever it comes from and whatever the policy does."""

import dataclasses
import functools
import json
import random
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from hocket.algorithm.losses import LossOutput
from hocket.client.server import ServerClient
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, ServerError, TrainerError
from hocket.trainer import reference
from hocket.trainer.objective import BatchLoss
from hocket.trainer.ranks import Ranks
from hocket.trainer.trainer import Trainer
from hocket.types import Columns, TrainSample
from support import fakes, training
from support.training import additions, assert_near, logprobs_of

ROLLOUTS = training.make_rollouts(9, longest=20, seed=1)
LONGEST = max(len(rollout.token_ids) for rollout in ROLLOUTS)


def make_trainer(ranks: Ranks, model: str, *settings: str) -> Trainer:
    defaults = ("trainer.learning_rate=1e-2", "algorithm.preset=reinforce_pp")
    return training.make_trainer(ranks, model, *defaults, *settings)


def make_samples() -> list[TrainSample]:
    rng = random.Random(2)
    return [training.sample_of(rollout, rng.gauss(0, 1)) for rollout in ROLLOUTS]


def assert_close(measured: Sequence[Columns], expected: Sequence[Sequence[float]], model: str) -> None:
    for one, other in zip(measured, expected, strict=True):
        assert_near(one["ref_logprobs"], other, additions(model))


# In 32 bits only ZeRO-3 makes a difference to a frozen model.
@pytest.mark.parametrize(("stage", "tokens", "temperature"), [(1, 19, 1.0), (3, 1000, 2.0)])
def test_the_start_stays_the_reference_while_the_policy_moves(
    ranks: Ranks,
    tied_model: str,
    stage: int,
    tokens: int,
    temperature: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = (f"trainer.zero_stage={stage}", f"trainer.micro_batch_tokens={tokens}")
    monkeypatch.setattr("hocket.trainer.policy.CHUNK_TOKENS", 7)
    expected = logprobs_of(tied_model, ROLLOUTS, temperature)
    with make_trainer(ranks, tied_model, *settings, f"rollout.temperature={temperature}") as trainer:
        for _ in range(3):
            assert_close(trainer.measure(ROLLOUTS), expected, tied_model)
            trainer.step(make_samples())
        measured = trainer.measure(ROLLOUTS)
        trainer.export(tmp_path / "policy")
    assert_close(measured, expected, tied_model)
    moved = max(
        abs(a - b)
        for one, other in zip(logprobs_of(tmp_path / "policy", ROLLOUTS, temperature), expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert moved > 0.5
    assert all(one.keys() == {"ref_logprobs"} for one in measured)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])  # ZeRO-3 gathers the weights of each layer
def test_the_base_of_an_adapter_is_its_reference_to_the_last_bit_and_training_does_not_notice(
    ranks: Ranks, untied_model: str, stage: int, tmp_path: Path
) -> None:
    samples, rollouts = make_samples()[:3], ROLLOUTS[:3]
    settings = (f"trainer.zero_stage={stage}", "trainer.micro_batch_tokens=1000")
    with make_trainer(ranks, untied_model, *settings) as trainer:
        base = trainer.measure(rollouts)
    with make_trainer(ranks, untied_model, *settings, "model.lora={}") as trainer:
        assert len(trainer.learners) + len(trainer.tensors) == 1, "there is no second model"
        training.save(trainer, tmp_path / "state")
        norms = [trainer.step(samples)["train/grad_norm"] for _ in range(2)]
        training.load(trainer, tmp_path / "state")
        for norm in norms:
            assert trainer.measure(rollouts) == base
            assert trainer.step(samples)["train/grad_norm"] == norm > 0
        assert trainer.measure(rollouts) == base


def test_another_model_can_be_the_reference_beside_an_adapter(ranks: Ranks, tied_model: str, untied_model: str) -> None:
    with make_trainer(ranks, tied_model, f"algorithm.reference={untied_model}", "model.lora={}") as trainer:
        trainer.step(make_samples())
        assert_close(trainer.measure(ROLLOUTS), logprobs_of(untied_model, ROLLOUTS), untied_model)


@pytest.mark.parametrize(("preset", "key"), [("reinforce_pp", "algorithm.reference"), ("ppo", "critic.path")])
def test_a_model_with_another_vocabulary_is_refused(ranks: Ranks, tied_model: str, preset: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=checkpoints/tiny-sort has another vocabulary than model"):
        make_trainer(ranks, tied_model, f"algorithm.preset={preset}", f"{key}=checkpoints/tiny-sort")


@pytest.mark.parametrize("stage", [0, 1, 3])  # cast by ZeRO-0, as it is, and spread by ZeRO-3
def test_in_16_bits_a_policy_that_has_not_moved_agrees_with_its_reference_to_the_last_bit(
    ranks: Ranks, untied_model: str, stage: int
) -> None:
    with make_trainer(ranks, untied_model, f"trainer.zero_stage={stage}", "model.dtype=bfloat16") as trainer:
        measured = trainer.measure(ROLLOUTS)
        samples = [
            dataclasses.replace(sample, sequence=dataclasses.replace(sample.sequence, logprobs=known["ref_logprobs"]))
            for sample, known in zip(make_samples(), measured, strict=True)
        ]
        assert training.gap_of(trainer, samples) == 0
        trainer.step(samples)
        assert training.gap_of(trainer, samples) > 0


def test_a_rollout_that_nothing_is_asked_of_may_be_longer_than_a_micro_batch(ranks: Ranks, tied_model: str) -> None:
    first, second = sorted(ROLLOUTS, key=lambda rollout: len(rollout.token_ids))[::8]
    cut = dataclasses.replace(second, finish_reason="length")
    settings = (f"trainer.micro_batch_tokens={len(first.token_ids) - 1}", "algorithm.mask_truncated=true")
    with make_trainer(ranks, tied_model, *settings) as trainer:
        (alone,) = trainer.measure([first])
        assert trainer.measure([cut, first, cut]) == [{}, alone, {}]
        assert trainer.measure([cut]) == [{}]
        with pytest.raises(TrainerError, match=f"a sequence of {len(second.token_ids)} tokens doesn't fit"):
            trainer.measure([first, second])
        assert trainer.measure([first]) == [alone]  # it goes on


def test_without_a_divergence_or_with_a_loss_of_its_own_there_is_nothing_to_measure_and_no_second_model(
    ranks: Ranks, tied_model: str
) -> None:
    loss: BatchLoss = lambda logprobs_bt, *_: LossOutput(loss=-logprobs_bt.sum(), metrics={})  # noqa: E731
    kl = ("algorithm.preset=ppo", "algorithm.kl=k2", "algorithm.kl_coef=0.1")
    for own, settings in ((None, ("algorithm.preset=grpo",)), (loss, kl)):
        with training.make_trainer(ranks, tied_model, *settings, loss=own) as trainer:
            assert trainer.measure(ROLLOUTS) == []
            assert len(trainer.learners) + len(trainer.tensors) == 1
    with make_trainer(ranks, tied_model) as trainer:
        assert trainer.measure([]) == []


@pytest.mark.parametrize("more", [-1, 1])
async def test_an_answer_that_has_not_one_log_prob_for_each_token_is_refused_at_once(
    more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, tries = ROLLOUTS[0], 0
    count = len(rollout.token_ids) - 1  # of the prompt: the last token is scored apart

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal tries
        if request.url.path == "/health":
            return httpx.Response(200, text=fakes.health(tokenizer_sha256="same").model_dump_json())
        tries += 1
        scores = [{str(id_): {"logprob": -1.0}} for id_ in [*rollout.token_ids, 0]][: count + more]
        last = {f"token_id:{rollout.token_ids[-1]}": -1.0}
        choice = {"prompt_logprobs": scores, "logprobs": {"top_logprobs": [last]}}
        return httpx.Response(200, json={"choices": [choice]})

    client = functools.partial(ServerClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(reference, "ServerClient", client)
    with pytest.raises(ServerError, match=rf"/v1/completions answered {count + more} log-probs for a .* {count} tok"):
        await reference._ask_until_answered("http://reference", "same", [rollout], None)
    assert tries == 1


class Scorer(BaseHTTPRequestHandler):
    """A server that gives the n-th token of a sequence the log-prob −n; it fails `failures` times."""

    sha256 = ""
    failures = 0

    def do_GET(self) -> None:
        self._answer(fakes.health(tokenizer_sha256=self.sha256).model_dump())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, body["prompt_logprobs"], body["max_tokens"]) == ("/v1/completions", 0, 1)
        assert self.headers["Content-Type"] == "application/json"
        assert self.headers["Authorization"] == "Bearer a-token-of-some-length"
        if Scorer.failures > 0:
            Scorer.failures -= 1
            return self._answer({"error": {"code": "dead", "message": "the engine has died"}}, 500)
        prompt, (last,) = body["prompt"], body["logprob_token_ids"]
        assert len(prompt) < LONGEST  # vLLM wants room for one more token
        scores = [None, *({str(one): {"logprob": -n, "rank": 1}} for n, one in enumerate(prompt[1:], start=1))]
        sampled = {f"token_id:{last + 1}": -0.5, f"token_id:{last}": -len(prompt)}
        self._answer({"choices": [{"prompt_logprobs": scores, "logprobs": {"top_logprobs": [sampled]}}]})

    def _answer(self, content: object, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_a_server_scores_what_was_sampled_if_its_tokens_are_the_same(
    ranks: Ranks, tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOCKET_TOKEN", "a-token-of-some-length")
    with ThreadingHTTPServer(("127.0.0.1", 0), Scorer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        cut = dataclasses.replace(ROLLOUTS[0], finish_reason="length")
        settings = (f"algorithm.reference={url}", "algorithm.mask_truncated=true")
        with make_trainer(ranks, tied_model, *settings) as trainer:
            with pytest.raises(ConfigError, match=rf"algorithm.reference={url} serves m, with another tokenizer than"):
                trainer.measure(ROLLOUTS)
            monkeypatch.setattr(Scorer, "sha256", tokenizers.fingerprint(trainer.tokenizer))
            expected = [[-float(n) * on for n, on in enumerate(rollout.mask)] for rollout in ROLLOUTS]
            assert len(trainer.learners) + len(trainer.tensors) == 1, "there is no second model"
            monkeypatch.setattr(Scorer, "failures", 2)
            monkeypatch.setattr("hocket.trainer.reference.WAITS_S", (0.0, 0.0))
            assert [[*one["ref_logprobs"]] for one in trainer.measure(ROLLOUTS)] == expected
            assert Scorer.failures == 0
            assert trainer.measure([cut]) == [{}]
            trainer.step(make_samples())
        server.shutdown()
    with (
        make_trainer(ranks, tied_model, f"algorithm.reference={url}") as trainer,
        pytest.raises(ServerError, match=rf"can't reach {url}/health: .*; start one there: .* serve CONFIG"),
    ):
        trainer.measure(ROLLOUTS)
