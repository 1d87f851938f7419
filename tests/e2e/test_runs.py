"""Whole runs with real processes: a control, two terminals in the wrong order, Ctrl-C, a dead server.

Only the tests of how a run starts and ends start it as a user does; the others have a server in common.
"""

import json
import re
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from hocket.launch import what_next
from support.processes import FORKS, ROOT, START_S, Command, Process, Run, Server, free_port, is_gone

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def running(command: str, log: Path, *settings: str) -> Process:
    """`run.py COMMAND config/quickstart.yaml SETTINGS`, gone with all it started when the body of `with` ends."""
    return Process([command, "config/quickstart.yaml", *settings], log)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that runs use one after the other; they are in its folder."""
    server = Server(tmp_path_factory.mktemp("server"), free_port())
    yield server.wait_ready()
    server.end()


def ranks_of(processes: list[psutil.Process]) -> list[str]:
    """Returns "RANK of SIZE" of the trainers among the processes."""
    environments = [process.environ() for process in processes if "train" in process.cmdline()]
    return [f"{env['RANK']} of {env['WORLD_SIZE']}" for env in environments]


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_plays_ahead_learns_too_and_is_trained_again_from_its_files_to_the_last_bit(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [
        "algorithm.oversampling=2",
        "trainer.steps=24",
        "trainer.learning_rate=3e-4",
        "eval.every_steps=0",
        "eval.num_prompts=128",
        "checkpoint.every_steps=0",
    ]
    with Run(server.folder, "ahead", [server], "pipeline.max_staleness=2", *settings) as run:
        assert run.wait_end(START_S + 300) == 0, run.output()
    steps = metrics_of(run.dir)[1:]
    summary = json.loads((run.dir / "summary.json").read_text())
    assert summary["after"]["sampled"] >= summary["before"]["sampled"] + 0.25, run.output()
    assert max(step["staleness/max"] for step in steps) <= 2
    assert all(step["staleness/over_bound"] == 0 for step in steps)
    assert statistics.fmean(step["staleness/mean"] for step in steps) > 0.5
    played = [step["rollout/oversampling"] for step in steps]
    assert max(played) > 1  # some groups taught nothing
    assert max(played) <= 2
    assert all(step["train/sequences"] == 16 * 8 for step, times in zip(steps, played, strict=True) if times < 2)

    monkeypatch.setattr(Run, "forked", False)  # as a user starts it: those that are forked must not differ
    with Run(server.folder, "again", [], f"pipeline.replay={run.dir}", *settings) as again:
        assert again.wait_end() == 0, again.output()
    for one, other in zip(steps, metrics_of(again.dir)[1:], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/logprob_gap", "train/entropy", "reward/mean"):
            assert one[name] == other[name], (one["step"], name)


def test_an_adapter_alone_learns_and_merges_into_a_model(tmp_path: Path) -> None:
    settings = ["model.lora={}", "sync.backend=nccl", "trainer.learning_rate=2e-3", "trainer.steps=15"]
    measured = ["eval.num_prompts=256", "eval.every_steps=0"]
    with Server(tmp_path, free_port(), *settings).wait_ready() as server:
        with Run(tmp_path, "lora", [server], *settings, *measured) as run:
            assert run.wait_end(START_S + 300) == 0, run.output()
        server.end()
    out, run_dir = run.output(), run.dir
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["before"]["sampled"] <= 0.35, out
    assert summary["after"]["sampled"] >= summary["before"]["sampled"] + 0.3, out
    steps = metrics_of(run_dir)[1:]
    assert max(step["train/logprob_gap"] for step in steps) < 1e-3
    # A and B of rank 16 for 7 layers (128 wide, 64 for keys and values, 256 in the MLP) in each of 2 blocks.
    widths = [(128, 128), (128, 64), (128, 64), (128, 128), (128, 256), (128, 256), (256, 128)]
    mebibytes = 2 * sum(16 * (i + o) for i, o in widths) * 4 / 2**20
    assert all(mebibytes <= step["sync/mebibytes"] <= mebibytes + 0.02 for step in steps)
    assert all(step.get("sync/fallbacks", 0) == 0 for step in steps)
    # The command that a launch of this run would say at its end works, word by word.
    said = what_next(run_dir, ["config/sort.yaml", *settings])
    words = next(line for line in said.splitlines() if " export " in line).partition(" export ")[2].split()
    with Command(["export", *words], tmp_path / "export.log") as process:
        assert process.wait_end() == 0, process.output()
    merged = [f"model.path={run_dir}/model", f"run.dir={tmp_path}/runs/b", f"server.port={free_port()}"]
    with Command(["eval", "config/sort.yaml", *merged], tmp_path / "eval.log", **{FORKS: "1"}) as process:
        assert process.wait_end(START_S) == 0, process.output()
    line = next(row for row in process.output().splitlines() if row.startswith("eval/sampled "))
    assert abs(float(line.split()[1]) - summary["after"]["sampled"]) < 0.1


def untimed(run_dir: Path) -> list[dict[str, float]]:
    """Returns the lines of metrics.jsonl, without what depends on the clock."""
    timed = ("time/", "pipeline/")
    return [
        {k: v for k, v in line.items() if not (k.startswith(timed) or k.endswith("_s") or k == "train/mfu")}
        for line in metrics_of(run_dir)
    ]


def test_two_ranks_that_share_their_gpu_end_bit_for_bit_as_two_that_do_not_and_leave_no_process(tmp_path: Path) -> None:
    sizes = ["trainer.steps=3", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.num_prompts=16"]
    folders = []
    for shares in ("false", "true"):
        settings = [*sizes, "sync.check_every=2", f"launch.share_gpu={shares}"]
        together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with Server(tmp_path, free_port(), *settings) as server:
            ranks = [
                Run(tmp_path, f"shares-{shares}", [server], *settings, RANK=rank, LOCAL_RANK=rank, **together)
                for rank in ("0", "1")
            ]
            with ranks[0], ranks[1]:
                ranks[0].wait_step(1)
                assert all(rank.members() for rank in ranks)
                assert [rank.wait_end() for rank in ranks] == [0, 0], ranks[0].output()
                for rank in ranks:
                    rank.assert_gone()
            server.end()
        folders.append(ranks[0].dir)
        assert "error: " not in ranks[0].output()
        assert [line["step"] for line in metrics_of(folders[-1])] == [0, 1, 2, 3]
        assert ("time/turn" in metrics_of(folders[-1])[1]) == (shares == "true")
    assert untimed(folders[0]) == untimed(folders[1])
    weights = [(folder / "weights" / "v000004" / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    assert weights[0] != (ROOT / "checkpoints" / "tiny-sort" / "model.safetensors").read_bytes()


def test_agents_teach_an_adapter_on_a_shared_gpu(tmp_path: Path) -> None:
    folder, port = tmp_path / "agents", free_port()
    sizes = ["trainer.steps=3", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.num_prompts=0"]
    settings = ["model.lora={rank: 4}", "launch.share_gpu=true", "sync.check_every=2", f"server.port={port}"]
    words = ["config/agent.yaml", *sizes, *settings, f"run.dir={folder}"]
    with (
        Command(["serve", *words, "server.kv_cache_mib=64"], tmp_path / "serve.log") as server,
        Command(["train", *words], tmp_path / "train.log") as trainer,
    ):
        assert trainer.wait_end(600) == 0, trainer.output()
        server.end()
    steps = metrics_of(folder)[1:]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert "time/turn" in steps[0]
    for step in steps:  # each was played by the adapter of the step before
        assert step["rollout/turns_mean"] > 1
        assert step["rollout/reward_errors"] == step["staleness/max"] == 0
        assert step["train/logprob_gap"] < 1e-5
    adapter = load_file(folder / "weights" / "v000004" / "adapter_model.safetensors")
    assert max(float(tensor.abs().max()) for name, tensor in adapter.items() if "lora_B" in name) > 1e-4


def test_the_judge_of_the_example_teaches_what_another_checker_measures(tmp_path: Path) -> None:
    run_dir, log, port = tmp_path / "runs" / "a", tmp_path / "log", free_port()
    page = (ROOT / "examples" / "judge" / "README.md").read_text(encoding="utf-8")
    judge, train, _ = re.findall(r"^(?:.venv/bin/python|python3) (.*)$", page, re.M)  # the third leaves a gap
    here = [f"run.dir={run_dir}", "trainer.steps=15", "eval.every_steps=0", f"server.port={free_port()}"]
    here += [f"rewards.functions.judge.base_url=http://127.0.0.1:{port}/v1"]
    judging = Process([str(port)], tmp_path / "judge.log", program=judge.split())
    with judging, Command([*train.split()[1:], *here], log, **{FORKS: "1"}) as process:
        assert process.wait_end(START_S + 300) == 0, log.read_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["after"]["sampled"] >= summary["before"]["sampled"] + 0.2, log.read_text()
    steps = metrics_of(run_dir)[1:]
    assert all(step["rollout/reward_errors"] == 0 and step["reward/judge/calls"] > 0 for step in steps)
    assert steps[-1]["reward/judge"] > steps[0]["reward/judge"]
    held_out = (run_dir / "rollouts" / "eval_000015.jsonl").read_text().splitlines()
    assert {*json.loads(held_out[0])["parts"]} == {"exact_match"}


def test_a_random_reward_teaches_nothing(server: Server) -> None:
    control = ["rewards.functions={random: 1.0}", "eval.reward=exact_match", "trainer.steps=30", "eval.every_steps=0"]
    with Run(server.folder, "random", [server], *control, "eval.num_prompts=256") as run:
        assert run.wait_end(START_S + 300) == 0, run.output()
    summary = json.loads((run.dir / "summary.json").read_text())
    assert summary["after"]["sampled"] <= summary["before"]["sampled"] + 0.1


def test_a_trainer_started_first_waits_for_the_server_and_both_end_cleanly(tmp_path: Path) -> None:
    run_dir, port = tmp_path / "runs" / "a", free_port()
    never_right = "rollout.max_tokens=1"  # so that no step updates the weights
    settings = [f"run.dir={run_dir}", f"server.port={port}", "trainer.steps=2", "eval.num_prompts=8", never_right]
    with Command(["train", "config/sort.yaml", *settings], tmp_path / "train.log") as trainer:
        waiting = f"waiting for http://127.0.0.1:{port} (nothing answers there yet)"
        trainer.wait_for(lambda: waiting in trainer.output(), waiting)
        with Command(["serve", "config/sort.yaml", *settings], tmp_path / "serve.log") as server:
            assert trainer.wait_end(START_S) == 3, trainer.output()
            assert "\n0 of 2 steps updated the weights: all rewards of each group were equal" in trainer.output()
            server.members()
            server.popen.send_signal(signal.SIGINT)
            assert server.wait_end(30) == 0, (tmp_path / "serve.log").read_text()
            server.assert_gone()
    assert metrics_of(run_dir)[-1]["step"] == 2


def test_ctrl_c_ends_a_quickstart_with_a_checkpoint_and_everything_it_started(tmp_path: Path) -> None:
    run_dir, log = tmp_path / "runs" / "a", tmp_path / "log"
    with running("quickstart", log, f"run.dir={run_dir}") as process:
        process.wait_for((run_dir / "rollouts" / "step_000002.jsonl").exists, "step_000002")
        process.members()
        process.popen.send_signal(signal.SIGINT)
        assert process.wait_end(60) == 130, log.read_text()
        process.assert_gone()
    assert "Traceback" not in log.read_text()
    assert log.read_text().count("interrupted: after this step") == log.read_text().count("interrupted") == 1
    steps = [*(run_dir / "checkpoints").iterdir()]
    assert f"\ncheckpointed; to go on from {steps[0]}: python3 " in log.read_text()
    assert len(steps) == 1
    last_step = int(steps[0].name[-6:])
    assert len(metrics_of(run_dir)) == last_step + 1
    assert f"\nstep {last_step}/" in log.read_text()


def test_a_killed_launch_takes_its_server_and_ranks_along(tmp_path: Path) -> None:
    run_dir, log = tmp_path / "runs" / "a", tmp_path / "log"
    with running("launch", log, f"run.dir={run_dir}", "launch.trainers=2") as process:
        process.wait_for((run_dir / "rollouts" / "step_000001.jsonl").exists, "step_000001")
        members = process.members()
        assert sorted(ranks_of(members)) == ["0 of 2", "1 of 2"]
        assert len([member for member in members if member.cmdline()[1:5] == ["-P", "-m", "hocket", "serve"]]) == 1
        process.kill()
        process.assert_gone()


def test_a_server_that_dies_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    run_dir, log, port = tmp_path / "runs" / "a", tmp_path / "log", free_port()
    words = ["quickstart", "config/quickstart.yaml", f"run.dir={run_dir}", f"server.port={port}"]
    with Command(words, log, **{FORKS: "1"}) as process:
        process.wait_for((run_dir / "rollouts" / "step_000001.jsonl").exists, "step_000001")
        listening = psutil.net_connections("tcp4")
        (server,) = {one.pid for one in listening if one.laddr.port == port and one.status == psutil.CONN_LISTEN}
        engine = psutil.Process(server).children(recursive=True)
        assert engine
        psutil.Process(server).kill()
        assert process.wait_end(120) == 1
        assert all(is_gone(pid) for pid in (server, *(one.pid for one in engine)))
    out = log.read_text()
    assert "error: " in out
    assert "Traceback" not in out
