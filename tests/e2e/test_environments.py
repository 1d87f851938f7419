"""Episodes of several turns on a real server: their log-probs, and a policy that learns."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket import config
from hocket.client.pool import Deadline, ServerPool
from hocket.commands.runs import Parts
from hocket.common.registry import load_plugins
from hocket.data import tokenizer
from hocket.observe.console import Console
from hocket.rollout.collect import Plan, collect
from hocket.rollout.pipeline import sampling_params
from hocket.types import Group, TokenSequence
from support.batches import drawing, scorer_of_all
from support.processes import ROOT, START_S, Command, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("environments")) / "runs"


@pytest.fixture(scope="module")
def port(runs: Path) -> Iterator[int]:
    """A server of checkpoints/tiny-tools."""
    free = free_port()
    runs.mkdir()
    settings = [f"server.port={free}", f"run.dir={runs}/server", "server.engine.tool_call_parser=hermes"]
    with Command(["serve", "config/guess.yaml", *settings], runs.parent / "server.log") as server:
        server.wait_for(lambda: "ready on" in server.output(), "the server is ready")
        yield free
        server.end()


async def groups_of(
    name: str, port: int, runs: Path, *overrides: str, num_prompts: int = 16, group_size: int = 8
) -> list[Group]:
    """Plays one step of config/NAME.yaml, as the loop does."""
    overrides = (f"server.port={port}", f"run.dir={runs}/{name}-played", *overrides)
    settings = config.load(ROOT / "config" / f"{name}.yaml", overrides)
    load_plugins(settings.plugins)
    parts = Parts.make(settings, Console(steps=1))
    prompts = parts.load(compare=False).training[""]
    plan = Plan(
        label="s",
        sampling=sampling_params(settings.rollout, seed=0, step=1),
        group_size=group_size,
        wanted=num_prompts,
        at_most=num_prompts,
        deadline=Deadline(120),
    )
    async with ServerPool(settings.server_urls) as servers:
        play = parts.training_play(parts.plays(servers, parts.longest))
        with scorer_of_all(settings.rewards) as scorer:
            return (await collect(plan, drawing(prompts[:num_prompts]), play, scorer)).groups


def largest_gap(sequences: list[TokenSequence]) -> float:
    """Largest |Δ log-prob| of sampled tokens between the engine and transformers' own pass over whole episodes."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ROOT / "checkpoints" / "tiny-tools", dtype=torch.float32).eval()
    gaps = []
    for sequence in sequences:
        with torch.no_grad():
            logprobs = model(torch.tensor([sequence.token_ids])).logits[0].log_softmax(-1)
        for position in range(1, len(sequence.token_ids)):
            if sequence.mask[position]:
                expected = float(logprobs[position - 1, sequence.token_ids[position]])
                gaps.append(abs(expected - sequence.logprobs[position]))
    assert len(gaps) == sum(sum(sequence.mask) for sequence in sequences)
    return max(gaps)


async def test_the_logprobs_of_several_turns_are_those_of_the_whole_sequence(port: int, runs: Path) -> None:
    groups = await groups_of("guess", port, runs)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 128
    assert max(rollout.sequences[0].turns for rollout in rollouts) == 5
    assert largest_gap(sorted((rollout.sequences[0] for rollout in rollouts), key=lambda one: -one.turns)[:40]) < 1e-4
    tokens = tokenizer.load(str(ROOT / "checkpoints" / "tiny-tools"))
    for rollout in rollouts:  # the model says what the environment heard, and the hints are true
        text = tokens.decode(rollout.sequences[0].token_ids)
        said = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in rollout.sequences[0].dialogue)
        assert rollout.sequences[-1].turns == 1 or rollout.finish_reason == "length" or text.endswith(said)
    for score in (score for group in groups for score in group.scores):
        assert score.error is None
        assert 0.0 <= score.total <= 1.0
    again = await groups_of("guess", port, runs)
    assert [group.rollouts for group in again] == [group.rollouts for group in groups]


SOON = ("env.guesses=3", "env.near=0.9")  # a reward that is learned in fewer steps than that of config/guess.yaml


def test_the_policy_learns(port: int, runs: Path) -> None:
    learns(port, runs, "guess", 16, 0.08, *SOON)


def learns(port: int, runs: Path, name: str, steps: int, rise: float, *more: str) -> None:
    """Trains with config/NAME.yaml, and checks that the reward rises so much."""
    settings = [f"server.port={port}", f"run.dir={runs}/{name}", f"trainer.steps={steps}", "eval.num_prompts=0", *more]
    with Command(["train", f"config/{name}.yaml", *settings], runs.parent / f"{name}.log") as process:
        assert process.wait_end(START_S + 300) == 0, process.output()
    metrics = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()][1:]
    rewards = [step["reward/mean"] for step in metrics]
    assert len(rewards) == steps
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + rise, rewards
    assert max(step["train/logprob_gap"] for step in metrics) < 1e-3
    assert max(step["rollout/turns_mean"] for step in metrics) > 1
