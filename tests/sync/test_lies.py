"""A server that lies about weights or log-probs stops the run: a real engine, and real runs of the quickstart's model.

benchmarks/lies.py plays more of them, in other precisions, with other learning rates.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from support.processes import ROOT, Command

Outcomes = dict[tuple[str, ...], tuple[int, str]]
SETTINGS = (
    "model.path=checkpoints/tiny-sort",
    "model.dtype=float32",
    "server.kv_cache_mib=64",
    "rollout.max_tokens=16",
    "rollout.prompts_per_step=8",
    "rollout.temperature=0.9",
    "trainer.steps=8",
    "sync.check_every=5",
    "eval.num_prompts=0",
    "checkpoint.every_steps=0",
)
TINY = "trainer.learning_rate=1e-6"
STALE = "does not hold weight version"
APART = "and the trainer disagree on version"
WRONG = "step 3: a server's answer contradicts its tokens:"
GAP = "mean |Δ log-prob|"  # of the step's rollouts, or of a check that was due
EVALUATED = "the servers' log-probs of these rollouts are not the trainer's"
ODDS = "sampling/greedy_odds"
# (lie and the loads that it begins and ends with; settings): the last version that it may reach, and what is said then
LIES: dict[tuple[str, ...], tuple[int, str]] = {
    ("truth", "trainer.learning_rate=2e-4"): (0, ""),
    ("one_behind", TINY): (2, f"step 1: http://127.0.0.1:PORT {STALE}"),
    ("never_loads", TINY): (2, f"step 1: http://127.0.0.1:PORT {STALE}"),
    ("missing_matrix", "server.start_timeout_s=1"): (1, "loader left out weights of model.layers.1.mlp.down_proj"),
    ("frozen_matrix 3", TINY): (7, STALE),
    ("frozen_norm 3", TINY): (7, "the model differs in model.layers.1.input_layernorm.weight (1 in all)"),
    ("swapped_norms", TINY): (1, "the model differs in model.layers.0.input_layernorm.weight"),
    ("swapped_layers", TINY): (1, STALE),
    ("permuted_rows", TINY): (1, STALE),
    ("wrong_logprobs", TINY): (1, f"step 0: http://127.0.0.1:PORT {APART}"),
    ("shifted_logprobs", TINY): (1, APART),
    ("wrong_logprobs 3", TINY): (3, GAP),
    ("shifted_logprobs 3", TINY): (3, GAP),
    ("no_temperature", TINY): (1, APART),
    ("no_temperature 3", TINY): (3, GAP),
    ("top_k_2 3", TINY): (3, GAP),
    ("norm_off 3-3", TINY, "sync.check_every=0"): (3, GAP),
    ("larger_logprobs 3", TINY): (3, GAP),
    ("warmer 3", TINY): (3, GAP),
    ("top_p_95 3", TINY): (3, GAP),
    ("other_token 3", TINY): (3, f"{WRONG} its text is"),
    ("future 3", TINY): (3, "step 3: a server says that version"),
    ("matrix_off 9", "eval.num_prompts=16", "sync.check_every=0"): (9, f"step 8: {EVALUATED}: {GAP}"),
    ("greedy 9", "eval.num_prompts=256", "rollout.temperature=1"): (0, "eval/z"),
    ("top_p 3", TINY): (3, GAP),
    ("equal_seeds 3", TINY): (0, "sampling/equal_z"),
    ("greedy_quarter 3", "rollout.temperature=1", "rollout.prompts_per_step=16", "trainer.steps=5", TINY): (0, ODDS),
    ("all_stop 3", "rollout.max_tokens=4"): (3, f"{WRONG} it stopped by"),
    ("other_text 3", "rollout.stop=[zz]"): (3, f"{WRONG} its text is 'abcd'"),
    ("no_end 3", TINY): (3, f"{WRONG} it stopped by itself, but its last token"),
    ("longer 3", "rollout.max_tokens=4"): (3, "/generate cut step 3/"),
    ("shorter 3", "rollout.max_tokens=5"): (3, "/generate cut step 3/"),
    ("stale_export", TINY): (2, APART),
}


SEEING = ("model.path=checkpoints/tiny-shapes", "data.source=task:shapes", "rollout.temperature=1")
OF_VISION: dict[tuple[str, ...], tuple[int, str]] = {
    ("truth", "trainer.learning_rate=2e-4"): (0, ""),
    ("frozen_vision 3", TINY): (7, "the model differs in model.vision_model.encoder.layers.1.self_attn."),
    ("vision_off", TINY): (1, "the model differs in model.vision_model.encoder.layers.0.mlp.fc1.weight (1 in all)"),
    ("vision_off 3-3", TINY, "sync.check_every=0"): (3, GAP),
}


def played(folder: Path, settings: Sequence[str], lies: Iterable[tuple[str, ...]]) -> Outcomes:
    """Returns the version and the error that ended each run, on one server: a process of its own has the trainer."""
    task = json.dumps([str(folder / "server"), settings, list(lies)])
    environment = {"PYTHONPATH": str(ROOT / "tests")}  # of the server
    with Command(["play", task], folder / "log", program=["tests/lies.py"], **environment) as process:
        process.wait_end(1100)
    lines = [line.removeprefix("OUTCOME ") for line in process.output().splitlines() if line.startswith("OUTCOME ")]
    assert len(lines) == len(list(lies)), process.output()[-6000:]
    return {lie: tuple(json.loads(line)) for lie, line in zip(lies, lines, strict=True)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return played(tmp_path_factory.mktemp("lies"), SETTINGS, LIES)


@pytest.fixture(scope="module")
def outcomes_of_vision(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return played(tmp_path_factory.mktemp("lies"), (*SETTINGS, *SEEING), OF_VISION)


def hold(found: tuple[int, str], expected: tuple[int, str], lie: str) -> None:
    version, said = found
    latest, part = expected
    begins = int(lie.partition(" ")[2].partition("-")[0] or latest) if latest else 0
    assert begins <= version <= latest, said
    for piece in part.split("PORT"):
        assert piece in said


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie[0].replace(" ", "-"))
def test_a_server_that_lies_stops_the_run(outcomes: Outcomes, lie: tuple[str, ...]) -> None:
    hold(outcomes[lie], LIES[lie], lie[0])


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("lie", OF_VISION, ids=lambda lie: lie[0].replace(" ", "-"))
def test_a_server_that_lies_about_a_vision_tower_stops_the_run(
    outcomes_of_vision: Outcomes, lie: tuple[str, ...]
) -> None:
    hold(outcomes_of_vision[lie], OF_VISION[lie], lie[0])
