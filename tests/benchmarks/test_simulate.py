"""benchmarks/simulate.py with numbers that can be worked out by hand; nothing here is a real run."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("simpy", reason="a development package: requirements/dev.txt")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import simulate
from simulated_inputs import Setup, Speeds
from simulated_run import Simulation

TEN = [[10, 10]]  # every completion has ten tokens
PLAIN: dict[str, Any] = {  # every second in its place, nothing hidden
    "decode_fixed_s": 0.0, "decode_token_s": 0.0, "batch_s": 0.0, "reward_s": 0.0, "reward_workers": 0,
    "prompt_tokens": 0.0, "rollout_s": 0.0, "rollout_token_s": 0.0, "step_token_s": 0.0,
    "train_fixed_s": 0.0, "prepare_s": 0.0, "transfer_s": 0.0, "check_s": 0.0, "silence_s": 0.0,
}  # fmt: skip


def setup(**changed: Any) -> Setup:
    return Setup(**{"prompts": 4, "group_size": 2, "max_tokens": 10, "max_staleness": 0, "steps": 8} | changed)


def speeds(**changed: float) -> Speeds:
    return Speeds(**PLAIN | changed)


def result(a: Setup, b: Speeds, lengths: Any = TEN) -> dict[str, float]:
    return Simulation(a, b, lengths).run()


def test_a_step_in_turn_takes_the_sum_of_its_parts() -> None:
    parts = speeds(
        batch_s=1.0,
        admit_s=0.5,  # x 8 sequences = 4
        decode_fixed_s=0.2,
        decode_token_s=0.1,  # 10 iterations of .2 + 8 · .1 = 10
        rollout_s=0.25,  # rank 0 reads 8 rollouts that end together = 2
        reward_s=3.0,
        step_s=0.5,
        step_token_s=0.01,  # x 80 tokens = .8
        train_fixed_s=1.0,
        micro_batch_s=0.2,  # x 1
        position_s=0.1,  # x 80 tokens = 8
        prepare_s=0.3,
        transfer_s=0.2,
        per_server_s=0.4,
    )
    found = result(setup(), parts)
    assert found["step_s"] == pytest.approx(1 + 4 + 10 + 2 + 3 + 0.5 + 0.8 + 1 + 0.2 + 8 + 0.3 + 0.2 + 0.4)
    assert found["step_s"] * found["wait_for_batch"] == pytest.approx(1 + 4 + 10 + 2 + 3)
    assert found["step_s"] * found["train"] == pytest.approx(9.2)
    assert found["step_s"] * found["sync"] == pytest.approx(0.9)
    assert found["tokens_per_s"] == pytest.approx(80 / found["step_s"])
    assert found["step_s"] * (1 - found["servers_idle"]) == pytest.approx(4 + 10)
    assert found["wait_for_policy"] == pytest.approx(1 - 20 / found["step_s"])
    assert (found["staleness_mean"], found["staleness_max"]) == (0, 0)


@pytest.mark.parametrize(("decode_token_s", "position_s"), [(0.05, 0.1), (0.1, 0.05)])
def test_with_staleness_one_a_step_takes_as_long_as_the_slower_side(decode_token_s: float, position_s: float) -> None:
    # Where generation is slower, two steps repeat, one that waits and one that does not.
    found = result(setup(max_staleness=1), speeds(decode_token_s=decode_token_s, position_s=position_s))
    assert found["step_s"] == pytest.approx(80 * max(decode_token_s, position_s))
    assert found["staleness_max"] == 1  # admission bounds it


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_one_long_completion_is_waited_for_once_per_batches_in_flight(bound: int) -> None:
    # 10 s from a batch's begin to its end; all but 1 s of each of the `bound` updates in between is hidden behind it.
    found = result(setup(max_staleness=bound, steps=1), speeds(decode_fixed_s=1.0, train_fixed_s=1.0))
    assert found["step_s"] == pytest.approx(max(1.0, 11 / (bound + 1)))


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_no_rollout_is_older_than_the_bound(bound: int) -> None:
    lengths = [[1, 9], [3, 10], [2, 2]]
    found = result(setup(max_staleness=bound), speeds(decode_fixed_s=0.1, position_s=0.2), lengths)
    assert found["staleness_mean"] <= found["staleness_max"] <= bound


def test_more_sequences_than_places_queue() -> None:
    found = result(setup(max_concurrent=4), speeds(decode_fixed_s=1.0))  # 8 sequences of 10 tokens in two turns
    assert found["step_s"] == pytest.approx(20)


def test_a_lost_servers_share_is_played_again_and_it_comes_back_with_the_weights() -> None:
    parts = speeds(decode_fixed_s=1.0, silence_s=2.0, transfer_s=0.5, check_s=1.0)
    simulation = Simulation(setup(servers=2), parts, TEN)
    simulation.env.process(simulation.outage(simulation.servers[1], after_s=4.0, away_s=12.0))
    simulation.run()
    starts = [row["start"] for row in simulation.records]
    steps = [late - early for early, late in itertools.pairwise(starts)]
    # Lost at 4, noticed at 6, played again by the other until 16, then weights: .5 s. It answers at 16, and is brought
    # up before step 2: weights .5 and log-probs 1.
    assert steps[0] == pytest.approx(4 + 2 + 10 + 0.5 + 0.5 + 1.0)
    assert steps[1:] == pytest.approx([10.5] * 11)
    assert simulation.replayed == 4
    assert all(server.up and server.version == 12 for server in simulation.servers)


def test_without_any_server_the_run_waits_for_one() -> None:
    simulation = Simulation(setup(steps=2), speeds(decode_fixed_s=1.0), TEN)
    simulation.env.process(simulation.outage(simulation.servers[0], after_s=4.0, away_s=100.0))
    simulation.run()
    assert simulation.records[1]["start"] == pytest.approx(4 + 100 + 10)


def test_a_machine_with_too_few_cores_slows_down_both_sides() -> None:
    # Each side alone would take 8 s; together they want two cores and have one and a half.
    found = result(setup(max_staleness=1), speeds(decode_token_s=0.1, position_s=0.1, cores=1.5))
    assert found["step_s"] == pytest.approx(8 / 0.75)


def test_rank_zeros_event_loop_bounds_the_rollouts_per_second() -> None:
    found = result(setup(servers=100, prompts=100), speeds(decode_fixed_s=1e-3, rollout_s=0.1))
    assert found["rollouts_per_s"] == pytest.approx(10, rel=0.01)
    assert found["rank0_busy"] == pytest.approx(1, rel=0.01)


def test_the_best_split_has_as_many_servers_as_keep_the_ranks_busy() -> None:
    # 3,200 tokens take 32 s of one server and 96 s of one rank: a quarter of the GPUs are servers.
    toy = speeds(decode_token_s=0.01, position_s=0.03)
    many = setup(max_staleness=1, prompts=160, group_size=1, max_tokens=20)
    for gpus, servers in ((4, 1), (8, 2), (64, 16)):
        split, found = simulate.best_split(gpus, many, lambda one: result(one, toy, [[20]]))
        assert (split.servers, split.ranks) == (servers, gpus - servers)
        assert found["step_s"] == pytest.approx(96 / split.ranks, rel=0.01)


def fake_run(folder: Path, *, prompts: int, seconds_per_token: float = 0.01, staleness: int = 0) -> Path:
    """Writes a run folder whose times follow a simple law, with lengths that vary from step to step."""
    (folder / "rollouts").mkdir(parents=True)
    config = {
        "rollout": {"prompts_per_step": prompts, "group_size": 2, "max_tokens": 12},
        "trainer": {"micro_batch_tokens": 8192},
        "server": {"tensor_parallel_size": 1, "engine": {}},
        "pipeline": {"max_staleness": staleness},
        "launch": {"trainers": 1},
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    with (folder / "metrics.jsonl").open("w") as lines:
        for step in range(13):
            lengths = [[4 + step % 3, 6], *([[5, 5 + step % 5]] * (prompts - 1))]
            flat = [length for group in lengths for length in group]
            tokens, positions = sum(flat), (sum(flat) + 3 * len(flat)) / 2  # half of them have a signal
            times = {
                "time/batch": 0.5 + 0.02 * max(flat) + seconds_per_token * tokens,
                "time/train": 0.25 + 0.01 * positions,
                "time/reward": 0.125,
                "time/sync": 0.75,
            }
            step_s = sum(times.values()) + 0.0625
            row = {"step": step, **times, "time/generate": times["time/batch"], "time/step": step_s}
            row |= {"rollout/tokens": tokens, "train/tokens": tokens, "train/sequences": len(flat) / 2}
            row |= {"train/positions_per_s": positions / times["time/train"], "train/micro_batches": 1.0}
            row |= {
                "sync/transfer_s": 0.5,
                "sync/servers": 1.0,
                "sync/mebibytes": 100.0,
                "pipeline/wait_for_policy": 0.5,
                "staleness/mean": 0.0,
            }
            lines.write(json.dumps(row) + "\n")
            rollouts = [
                {"group_id": f"g{i}", "num_tokens": length, "mask": [0] * 3 + [1] * length}
                for i, group in enumerate(lengths)
                for length in group
            ]
            path = folder / "rollouts" / f"step_{step:06d}.jsonl"
            path.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    return folder


def test_a_calibration_gives_the_numbers_of_its_runs(tmp_path: Path) -> None:
    runs = {f"{n}": simulate.read_run(fake_run(tmp_path / f"{n}", prompts=n)) for n in (2, 4, 16)}
    found = simulate.calibrate(runs, Speeds())
    got = found["speeds"]
    assert got["decode_fixed_s"] == pytest.approx(0.02, rel=0.05)
    assert got["decode_token_s"] + got["admit_s"] / 6 == pytest.approx(0.01, rel=0.05)  # about 6 tokens per sequence
    assert got["train_fixed_s"] + got["micro_batch_s"] == pytest.approx(0.25, rel=0.05)
    assert got["position_s"] == pytest.approx(0.01, rel=0.05)
    assert (got["prepare_s"], got["transfer_s"], got["reward_s"]) == pytest.approx((0.25, 0.5, 0.125), abs=3e-3)
    assert (got["trained_share"], got["prompt_tokens"]) == (0.5, 3.0)
    assert {5, 6} <= {length for group in found["lengths"] for length in group}
    assert {"mtbf_s", "per_server_s"} <= set(found["not_measured"])
    assert got["per_server_s"] == pytest.approx(100 * 2**20 / 50e9)  # a data sheet's figure
    assert found["setup"]["prompts"] == 2


def test_a_run_is_predicted_from_runs_of_other_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {f"{n}": simulate.read_run(fake_run(tmp_path / f"{n}", prompts=n)) for n in (2, 16)}
    calibration = tmp_path / "calibration.json"
    calibration.write_text(json.dumps(simulate.calibrate(runs, Speeds())))
    held_out = fake_run(tmp_path / "held-out", prompts=8)
    monkeypatch.setattr(sys, "argv", ["simulate.py", "check", str(calibration), str(held_out), "--json"])
    simulate.main()
    found = json.loads(capsys.readouterr().out)
    assert "SIMULATION" in found["what"]
    assert abs(found["results"]["held-out"]["error"]) < 0.1


def test_one_batch_size_is_said_to_be_too_little(tmp_path: Path) -> None:
    found = simulate.calibrate({"run": simulate.read_run(fake_run(tmp_path / "run", prompts=4))}, Speeds())
    assert any("ONE BATCH SIZE ONLY" in note for note in found["notes"])


def test_overlapping_runs_and_unknown_inputs_are_refused(tmp_path: Path) -> None:
    overlapping = simulate.read_run(fake_run(tmp_path / "run", prompts=4, staleness=1))
    with pytest.raises(SystemExit, match="max_staleness=0"):
        simulate.calibrate({"run": overlapping}, Speeds())
    with pytest.raises(SystemExit, match="did you mean max_staleness"):
        simulate.changed([Setup()], {"max_stalenes": "1"})
    with pytest.raises(SystemExit, match="can't be read as a run folder"):
        simulate.read_run(tmp_path / "nothing")


def test_every_output_is_marked_and_every_input_has_a_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate.py", "predict", "--gpus", "4", "prompts=4", "steps=2"])
    simulate.main()
    assert capsys.readouterr().out.startswith("SIMULATION, not a measurement; not calibrated: public figures")
    rows = simulate.inputs_table().splitlines()[2:]
    assert all(row.count(" | ") == 3 and "|  |" not in row for row in rows)
