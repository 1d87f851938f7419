"""Several trainer processes on the CPU: what two do together is what one does alone, at every ZeRO stage."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer import worker
from tests.trainer.test_updates import by_hand
from tests.trainer.test_vision import make_seeing
from transformers import AutoModelForCausalLM

from support import training
from support.numbers import rounding
from support.parameters import long
from support.processes import Process, free_port
from support.training import assert_near, assert_same_metrics, assert_same_states, pack, read_state, same, untimed

pytestmark = pytest.mark.ranks


DEADLINE_S = 600  # for all scenarios together; each wait of the ranks for each other has a deadline of its own


class Rank(Process):
    """One rank of worker.py."""

    forked = True


def start(size: int, output: Path, scenarios: Sequence[tuple[str, str]], program: str = worker.__file__) -> list[Rank]:
    """Starts scenarios, each with its model, one after the other among the same ranks; no launcher ends the others."""
    output.mkdir(parents=True, exist_ok=True)
    port, words = str(free_port()), [str(output), *itertools.chain(*scenarios)]
    ranks = []
    for rank in map(str, range(size)):
        together = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        variables = together | {"MASTER_PORT": port} if size > 1 else {}
        log = output / f"log-{scenarios[0][0]}-{rank}"
        ranks.append(Rank(words, log, program=[program], **variables))
    return ranks


def ended(ranks: Sequence[Rank]) -> list[int]:
    """Returns the exit statuses."""
    try:
        return [rank.wait_end(DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.__exit__()


def run_together(size: int, output: Path, scenarios: Sequence[tuple[str, str]], program: str = worker.__file__) -> None:
    ranks = start(size, output, scenarios, program)
    assert ended(ranks) == [0] * size, [rank.output() for rank in ranks]


STUCK = {  # the rank that does not answer, and what the other one says
    "rank_hangs": (1, "rank 0 lost the other ranks while doing the common update"),
    "rank_is_cut_off": (1, "rank 0 lost the other ranks while telling the other ranks what to do"),
    "main_is_cut_off": (0, "hocket: rank 1 ends, for rank 0, or the launcher, is gone: its store does not answer"),
}


@pytest.fixture(scope="module")
def stuck(tied_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Rank]]]:
    """The ranks of each scenario in STUCK: they wait for their deadlines while others work."""
    folder = tmp_path_factory.mktemp("stuck")
    started = {scenario: start(2, folder, [(scenario, tied_model)]) for scenario in STUCK}
    yield started
    for rank in itertools.chain(*started.values()):
        rank.__exit__()


@pytest.fixture(scope="module")
def runs(tied_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of ranks, the folder with one for each SCENARIO-MODEL of worker.py.

    All of them run among the same ranks, to pay the start of these once.
    """
    root = tmp_path_factory.mktemp("ranks")
    folders = {size: root / str(size) for size in (1, 2)}  # where "resumes" finds them
    for size, folder in folders.items():
        run_together(size, folder, [("stages", tied_model)])
    return folders


@pytest.fixture(scope="module")
def resumed(runs: dict[int, Path], tied_model: str) -> dict[int, Path]:
    """The same folders, when one rank has taken up the work of two, and two that of one."""
    for size in (1, 2):
        run_together(size, runs[size], [("resumes", tied_model)])
    return runs


@pytest.fixture(scope="module")
def more_runs(
    stuck: dict[str, list[Rank]],
    tied_model: str,
    untied_model: str,
    experts_model: str,
    tiny_vlm: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, Path]:
    """The same for what takes minutes."""
    root = tmp_path_factory.mktemp("more-ranks")
    folders = {size: root / str(size) for size in (1, 2, 3)}
    both = [(scenario, tied_model) for scenario in ("updates", "matrix", "adapter")]
    both.append(("sees", tiny_vlm))
    models = (tied_model, untied_model, experts_model)
    streams = [(scenario, model) for model in models for scenario in ("streams", "starts")]
    run_together(1, folders[1], [*both, ("splits", tied_model)])
    run_together(2, folders[2], [*both, *streams, ("beside", tied_model), ("reduces", tied_model)])
    run_together(3, folders[3], [("splits", tied_model)])
    return folders


def stats_of(runs: dict[int, Path], size: int, stage: int) -> list[dict[str, float]]:
    stats: list[dict[str, float]] = json.loads((runs[size] / "stages-tied" / str(stage) / "stats.json").read_text())
    return stats


def weights_of(runs: dict[int, Path], size: int, stage: int, name: str) -> dict[str, torch.Tensor]:
    return load_file(runs[size] / "stages-tied" / str(stage) / name / "model.safetensors")


def masters_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the policy's weights, in float32 those that are published."""
    begin = "policy/master/model."
    return {name.removeprefix(begin): tensor for name, tensor in state.items() if name.startswith(begin)}


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_several_updates_are_those_of_a_plain_loop_at_every_zero_stage(
    more_runs: dict[int, Path], tied_model: str, size: int
) -> None:
    expected = by_hand(tied_model, training.make_groups(tied_model), worker.CORRECTED)
    for stage in range(4):
        folder = more_runs[size] / "updates-tied" / str(stage)
        assert_same_states(read_state(folder), expected, tied_model, updates=6)
        metrics, first = (
            json.loads((of / "metrics.json").read_text()) for of in (folder, more_runs[1] / "updates-tied" / "0")
        )
        assert metrics["train/updates"] == 6
        assert_same_metrics(untimed(metrics), untimed(first), tied_model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_like_one_at_every_zero_stage(runs: dict[int, Path], tied_model: str, stage: int) -> None:
    reference, stats = stats_of(runs, 1, 0), stats_of(runs, 2, stage)
    for step, expected in zip(stats[:3], reference[:3], strict=True):
        assert_same_metrics(untimed(step), untimed(expected), tied_model)
    expected_state = read_state(runs[1] / "stages-tied" / "0" / "checkpoint")
    for size in (1, 2):
        state = read_state(runs[size] / "stages-tied" / str(stage) / "checkpoint")
        assert_same_states(state, expected_state, tied_model, updates=3)
        assert same(weights_of(runs, size, stage, "before"), masters_of(state))


@pytest.mark.long
def test_two_ranks_measure_what_one_alone_would(more_runs: dict[int, Path], tied_model: str) -> None:
    folder = more_runs[2] / "beside-tied"
    samples = worker.make_samples(0)
    start = training.logprobs_of(tied_model, [sample.sequence for sample in samples])
    returns = [[float(trained) for trained in sample.sequence.mask] for sample in samples]
    for stage in range(4):
        seen = json.loads((folder / str(stage) / "seen.json").read_text())
        first, second, third = (
            {name: [one[name] for one in measured] for name in ("ref_logprobs", "values")}
            for measured in seen["measured"]
        )
        for measured in (first, second, third):  # the reference stays the start
            for row, other in zip(measured["ref_logprobs"], start, strict=True):
                assert_near(row, other, training.additions(tied_model))
        # The critic says 0 at first, and comes closer to 1 with each step: ½ (0 − 1)² is its first loss.
        assert {value for values in first["values"] for value in values} == {0.0}
        losses = [step["critic/loss"] for step in seen["stats"]]
        assert losses[0] == pytest.approx(0.5)
        tokens = [(v, r) for vs, rs in zip(second["values"], returns, strict=True) for v, r in zip(vs, rs, strict=True)]
        expected = sum(0.5 * (v - r) ** 2 for v, r in tokens) / sum(map(sum, returns))
        assert losses[1] == pytest.approx(expected, abs=rounding(training.additions(tied_model) + training.POSITIONS))
        assert losses[1] < losses[0]
        if stage > 0:
            before = json.loads((folder / "0" / "seen.json").read_text())
            for row, other in zip(third["values"], before["measured"][2], strict=True):
                assert_near(row, other["values"], training.gradient_additions(tied_model))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_is_not_finite_is_skipped_and_kept_and_leaves_the_weights(
    runs: dict[int, Path], size: int, stage: int
) -> None:
    stats = stats_of(runs, size, stage)
    assert [step["train/skipped"] for step in stats] == [False, False, False, True, False, False]
    # Warm-up over two steps, then linear decay over four: it goes by steps, those that are skipped among them.
    assert [step["train/learning_rate"] for step in stats] == [0.5e-3, 1e-3, 1e-3, 0.75e-3, 0.5e-3, 0.5e-3]
    before = weights_of(runs, size, stage, "before")
    assert same(weights_of(runs, size, stage, "skipped"), before)
    assert not same(weights_of(runs, size, stage, "after"), before)
    path = runs[size] / "stages-tied" / str(stage) / "skipped.json"
    assert training.read_batch(path)[4].sequence == worker.make_samples(3)[4].sequence
    assert json.loads(path.read_text())["not_finite"].startswith("advantages of sample 4")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_restored_checkpoint_continues_bit_for_bit(runs: dict[int, Path], size: int, stage: int) -> None:
    first, again = map(untimed, stats_of(runs, size, stage)[4:])
    assert first == again
    assert same(weights_of(runs, size, stage, "again"), weights_of(runs, size, stage, "after"))


@pytest.mark.long
def test_other_stages_and_numbers_of_ranks_take_up_what_was_saved_bit_for_bit(
    resumed: dict[int, Path], tied_model: str
) -> None:
    for size, stage in itertools.product((1, 2), range(4)):
        for other in (stage, (stage + 1) % 4):
            folder = resumed[size] / "resumes-tied" / str(stage) / str(other)
            saved = resumed[3 - size] / "stages-tied" / str(other) / "checkpoint"
            tensors = read_state(folder)
            assert len(tensors) == 3 * 26  # master weights and two moments of every parameter
            assert same(tensors, read_state(saved))
            assert (folder / "rest.json").read_text() == (saved / "rest.json").read_text()
            step, straight = json.loads((folder / "stats.json").read_text()), stats_of(resumed, 3 - size, other)[4]
            assert_same_metrics(untimed(step), untimed(straight), tied_model)  # sums in another order


@pytest.mark.long
def test_two_ranks_train_the_adapter_of_one(more_runs: dict[int, Path], tied_model: str) -> None:
    folders = [more_runs[size] / "adapter-tied" for size in (1, 2)]
    expected = read_state(folders[0] / "1")
    for stage in ("0", "1", "2", "3"):  # the last one with activations computed again
        state = read_state(folders[1] / stage)
        assert_same_states(state, expected, tied_model, updates=3)
        found = load_file(folders[1] / stage / "model" / "adapter_model.safetensors")
        masters = {f"base_model.model.{name}": tensor for name, tensor in masters_of(state).items()}
        assert same(found, {name.replace(".default", ""): tensor for name, tensor in masters.items()})
        assert same(load_file(folders[1] / stage / "streamed"), found)
        one, two = (json.loads((folder / stage / "stats.json").read_text()) for folder in folders)
        for step, other in zip(one, two, strict=True):
            assert_same_metrics(untimed(step), untimed(other), tied_model)


@pytest.mark.parametrize(
    ("scenario", "codes", "rank", "message"),
    [
        ("main_fails", [1, 0], 0, "rank 0 has a problem of its own"),  # between steps: the follower is released
        ("rank_dies", [1, -9], 0, "TrainerError: rank 0 lost the other ranks while doing the common update"),
        ("rank_is_full", [1, 1], 0, "stopped while doing the common update, for rank 1 failed: TrainerError: out of"),
        *long(
            ("main_dies", [-9, 1], 1, "TrainerError: rank 1 lost the other ranks while waiting for work from rank 0"),
            ("rank_waits_for_ever", [1, 1], 0, "hocket: rank 0 ends, for rank 1 failed: TrainerError: out of memory"),
            (
                "log_probs_differ",
                [1, 1],
                0,
                "SyncError: the servers' log-probs of these rollouts are not the trainer's",
            ),
        ),
    ],
)
def test_a_failure_ends_all_ranks_with_the_reason(
    tied_model: str, tmp_path: Path, scenario: str, codes: list[int], rank: int, message: str
) -> None:
    ranks = start(2, tmp_path, [(scenario, tied_model)])
    assert ended(ranks) == codes, [each.output() for each in ranks]
    assert message in ranks[rank].output()


@pytest.mark.long
@pytest.mark.parametrize("scenario", STUCK)
def test_a_rank_that_does_not_answer_ends_the_other_at_its_deadline(
    stuck: dict[str, list[Rank]], scenario: str
) -> None:
    silent, message = STUCK[scenario]
    other = stuck[scenario][1 - silent]
    assert other.wait_end(DEADLINE_S) == 1, other.output()
    assert stuck[scenario][silent].popen.poll() is None
    assert message in other.output()
    waited = "no answer in 20 s" if silent == 0 else "did not answer within 6 x sync.timeout_s = 20"
    assert waited in other.output()


@pytest.mark.long
@pytest.mark.parametrize("model", ["tied", "untied", "experts"])
def test_two_ranks_stream_what_they_export_at_every_zero_stage(
    more_runs: dict[int, Path], model: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(f"{model}_model")
    gaps = []
    for stage in range(4):
        folder = more_runs[2] / f"streams-{model}" / str(stage)
        streamed, found = load_file(folder / "streamed"), json.loads((folder / "found.json").read_text())
        assert same(streamed, load_file(folder / "model.safetensors"))
        assert streamed.keys() == load_file(Path(path) / "model.safetensors").keys()
        assert found["layout"] == {name: ["float32", [*tensor.shape]] for name, tensor in streamed.items()}
        gaps.append(found["gap"])
    assert_near(gaps, [gaps[0]] * 4, training.gradient_additions(path))  # of which a step has made the weights
    assert gaps[0] > 0.1


@pytest.mark.long
@pytest.mark.parametrize("model", ["tied", "untied", "experts"])
def test_at_zero_3_no_rank_holds_the_whole_model_and_the_weights_are_those_of_zero_2(
    more_runs: dict[int, Path], model: str
) -> None:
    folder = more_runs[2] / f"starts-{model}"
    for kind in ("loaded", "random", "lora"):
        assert same(load_file(folder / f"{kind}-3"), load_file(folder / f"{kind}-2"))
    tensors = load_file(folder / "loaded-2").values()
    whole, largest = sum(tensor.nbytes for tensor in tensors), max(tensor.nbytes for tensor in tensors)
    for rank in (0, 1) if model != "experts" else (1,):  # transformers joins experts as rank 0 loads, on its CPU
        held = int((folder / f"held_by_{rank}").read_text())
        assert whole / 3 < held < whole / 2 + 2 * largest


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_in_bfloat16_are_summed_over_ranks_in_float32(more_runs: dict[int, Path], stage: int) -> None:
    gradient = load_file(more_runs[2] / "reduces-tied" / str(stage))["gradient"]
    rounded = gradient.bfloat16().float()
    assert (gradient != rounded).float().mean() > 0.3  # a sum that was rounded to 16 bits would be one of these
    assert torch.equal(gradient, load_file(more_runs[2] / "reduces-tied" / "1")["gradient"])


@pytest.fixture(scope="module")
def reference(tied_model: str) -> dict[str, Any]:
    """Two steps of plain torch on whole sequences, one by one; the second update depends on both gradients."""
    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    losses, norms = [], []
    for step, rate in enumerate((0.5e-3, 1e-3)):
        optimizer.param_groups[0]["lr"] = rate
        total, num_tokens = torch.zeros(()), 0
        for sample in worker.make_samples(step):
            full = torch.log_softmax(model(torch.tensor([sample.sequence.token_ids])).logits[0, :-1], dim=-1)
            logprobs = full.gather(-1, torch.tensor(sample.sequence.token_ids[1:])[:, None])[:, 0]
            weight = (logprobs.detach() - torch.tensor(sample.sequence.logprobs[1:])).exp().clamp(max=2)
            ratio = (logprobs - logprobs.detach()).exp()
            mask = torch.tensor(sample.sequence.mask[1:])
            total = total - (weight * torch.tensor(sample.advantages[1:]) * ratio)[mask].sum()
            num_tokens += int(mask.sum())
        optimizer.zero_grad()
        (total / num_tokens).backward()
        losses.append(total.item() / num_tokens)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
    stats = [{"loss": loss, "grad_norm": norm} for loss, norm in zip(losses, norms, strict=True)]
    return {"stats": stats, "state": training.plain_state(model, optimizer)}


SPLITS = [(size, name) for size, names in worker.SPLITS_OF.items() for name in names]
ALIKE = ("not shared", "ZeRO-1", "ZeRO-2", "ZeRO-3")  # ways to take the same steps, with shared beginnings and without
LIKE = {name: "1 not shared" if name[2:] in ALIKE else f"1 {name[2:]}" for _, name in SPLITS}


@pytest.mark.long
@pytest.mark.parametrize(("size", "name"), [one for one in SPLITS if one != (1, LIKE[one[1]])])
def test_groups_with_a_common_prompt_train_alike_whatever_is_shared_and_however_many_ranks_there_are(
    more_runs: dict[int, Path], tied_model: str, size: int, name: str
) -> None:
    assert_like_one(more_runs[1] / "splits-tied" / LIKE[name], more_runs[size] / "splits-tied" / name, tied_model)


def assert_like_one(alone: Path, folder: Path, tied_model: str) -> None:
    """Asserts that steps in a folder are those of one rank, but for rounding."""
    expected, found = (json.loads((one / "found.json").read_text()) for one in (alone, folder))
    for before, now in zip(expected["stats"], found["stats"], strict=True):
        compared = untimed({key: value for key, value in before.items() if key not in ("time/measure", "train/shared")})
        assert_same_metrics({key: now[key] for key in compared}, compared, tied_model)
        assert now["train/shared"] >= 0  # whatever rows are padded with, to be divided
    assert_same_metrics({"gap": found["gap"]}, {"gap": expected["gap"]}, tied_model)
    updates = sum(step["train/updates"] for step in found["stats"])
    rate = 1e-2 if "ppo" in folder.name else 1e-3  # of the critic
    assert_same_states(read_state(folder), read_state(alone), tied_model, updates, rate)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("cell", worker.MATRIX)
def test_steps_are_the_same_whatever_the_micro_batches_their_order_the_ranks_and_the_zero_stage(
    more_runs: dict[int, Path], reference: dict[str, Any], tied_model: str, cell: str, size: int
) -> None:
    first, folder = (more_runs[1] / "matrix-tied" / "ZeRO-0", more_runs[size] / "matrix-tied" / cell)
    assert_same_steps(folder, first, reference, tied_model)


def assert_same_steps(folder: Path, alone: Path, reference: dict[str, Any], tied_model: str) -> None:
    """Asserts that two steps are those of plain torch, and of another way, but for rounding."""
    steps = json.loads((folder / "stats.json").read_text())
    for step, expected in zip(steps, reference["stats"], strict=True):
        assert_same_metrics({name: step[f"train/{name}"] for name in expected}, expected, tied_model)
    state = read_state(folder)
    assert_same_states(state, reference["state"], tied_model, updates=2)
    assert same(load_file(folder / "model" / "model.safetensors"), masters_of(state))
    if "smallest" in folder.name:
        assert steps[0]["train/micro_batches"] >= 3  # or it would show nothing
    if "one micro-batch" in folder.name:
        assert steps[0]["train/micro_batches"] == 1
    first = json.loads((alone / "stats.json").read_text())
    for step, other in zip(steps, first, strict=True):
        assert_same_metrics(untimed(step), untimed(other), tied_model)


@pytest.mark.long
def test_two_ranks_train_a_model_that_sees_like_one_also_where_one_has_no_picture(
    more_runs: dict[int, Path], tiny_vlm: str
) -> None:
    ranks = pack(make_seeing(tiny_vlm), num_ranks=2, micro_batch_tokens=64)
    assert any(bool(one.images) != bool(other.images) for one, other in zip(*ranks, strict=True))
    for frozen, (size, name) in itertools.product(("", ", frozen"), itertools.product((1, 2), worker.SEEING)):
        folders = [
            more_runs[1] / "sees-idefics" / f"ZeRO-0{frozen}",
            more_runs[size] / "sees-idefics" / f"{name}{frozen}",
        ]
        expected, stats = (json.loads((folder / "stats.json").read_text()) for folder in folders)
        for one, other in zip(stats, expected, strict=True):
            names = ("train/loss", "train/grad_norm")
            assert_same_metrics({name: one[name] for name in names}, {name: other[name] for name in names}, tiny_vlm)
        reference, state = map(read_state, folders)
        assert_same_states(state, reference, tiny_vlm, updates=2)
        begin, weights = (
            load_file(Path(tiny_vlm) / "model.safetensors"),
            load_file(folders[1] / "model" / "model.safetensors"),
        )
        assert same(weights, begin | masters_of(state))  # what is frozen stays
