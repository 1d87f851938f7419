"""The chain of docs/tutorials/rlhf_chain.md at a small size: samples, pairs, rm, GRPO, PPO, dpo, ipo."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from support.processes import FORKS, START_S, Command, Server, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_samples_become_pairs_a_reward_model_and_better_policies(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    def done(command: str, *words: str, **environment: str) -> str:
        with Command([command, *words], tmp_path / "log", **environment) as process:
            assert process.wait_end(START_S + 300) == 0, process.output()
        return process.output()

    def records(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]

    with Server(tmp_path, free_port()).wait_ready() as server:
        asked = f"server.urls=[{server.url}]"
        for name, split, steps in (("samples", "train", 4), ("held_out", "test", 1)):
            sizes = (f"trainer.steps={steps}", f"data.split={split}", f"run.dir={runs / name}")
            done("rollout", "config/stages/samples.yaml", asked, *sizes)
            done("select", str(runs / name), "--pairs")
        rows = [f"data.source={runs}/samples/pairs.jsonl", f"eval.data.source={runs}/held_out/pairs.jsonl"]
        for command, name, *more in (
            ("rm", "rm", "rm.epochs=8"),
            ("dpo", "dpo", "dpo.batch_size=16"),
            ("dpo", "ipo", "dpo.batch_size=16", "dpo.loss=ipo"),
        ):
            done(command, f"config/stages/{command}.yaml", *rows, *more, f"run.dir={runs / name}")
            first, *_, last = records(name)
            assert last["eval/rewards/accuracies"] >= 0.9 > first["eval/rewards/accuracies"]
            assert last["eval/loss"] < 0.9 * first["eval/loss"]
        assert AutoModelForSequenceClassification.from_pretrained(runs / "rm" / "model").num_labels == 1
        scored = f"rewards.functions.reward_model.path={runs}/rm/model"
        for name in ("grpo", "ppo"):
            shorter = ("trainer.steps=10", "eval.every_steps=0", "critic.warmup_steps=2")
            done("train", f"config/stages/{name}.yaml", scored, asked, *shorter, f"run.dir={runs / name}")
            first, *steps, last = records(name)
            assert last["reward/mean"] > steps[0]["reward/mean"]  # of the reward model
            assert last["eval/sampled"] >= first["eval/sampled"] + 0.1  # of the checker
        server.end()
    sizes = ("eval.num_prompts=256", f"server.port={free_port()}", f"run.dir={runs / 'eval'}")
    said = done("eval", "config/sort.yaml", f"model.path={runs}/dpo/model", *sizes, **{FORKS: "1"})
    (sampled,) = (float(line.split()[1]) for line in said.splitlines() if line.startswith("eval/sampled "))
    assert sampled >= 0.4  # from 0.24
