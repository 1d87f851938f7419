"""What `train --dry-run` says of servers and rewards, with a trainer that loads nothing."""

import json
import os
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import hocket
from hocket.client.server import ServerClient
from hocket.commands import runs as commands
from hocket.commands.servers import Servers
from hocket.config import Config, load
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, HocketError, RewardError, ServerError
from hocket.launch import visible_gpus
from hocket.protocol import GenerateRequest
from hocket.rewards import reward
from hocket.rewards.base import REWARDS, bind
from hocket.server import vllm_arguments
from support import fakes
from support.examples import shown
from support.records import write_rows
from support.servers import FakeServer

ROOT = Path(__file__).parents[2]
SORT = ROOT / "checkpoints" / "tiny-sort"


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns what a dry run prints; one server answers, http://up, with what is given of its health."""
    model = tmp_path / "model"

    async def health(self: ServerClient) -> Any:
        if self.url != "http://up":
            raise ServerError("refused", code="unreachable")
        return fakes.health(**served)

    async def ask(self: ServerClient, request: GenerateRequest, *, timeout_s: float) -> None:
        assert request.sampling.max_tokens == 1
        if self._http.headers.get("Authorization") != "Bearer its-token":
            raise ServerError("answered 401: this server wants a token", code="unauthorized", status=401)
        if request.tools is not None:
            raise ServerError(f"vLLM's tool parser {request.tools.parser!r} can't be used", code="invalid", status=422)

    served: dict[str, Any] = {}
    monkeypatch.setattr(ServerClient, "health", health)
    monkeypatch.setattr(ServerClient, "ask", ask)
    trainer = SimpleNamespace(description="little", num_parameters=7, micro_batch_tokens=8192)
    monkeypatch.setattr("hocket.trainer.trainer.Trainer", lambda _: nullcontext(trainer))
    monkeypatch.setenv("HOCKET_TOKEN", "its-token")

    def run(*settings: str, **other: Any) -> str:
        served.clear()
        same = {"architecture": "Qwen2ForCausalLM b5a32aba", "root": str(tmp_path), "max_length": 512}
        served.update(same | {"tokenizer_sha256": tokenizers.fingerprint(tokenizers.load(str(SORT)))} | other)
        shutil.copytree(ROOT / "checkpoints" / "tiny-sort", model, dirs_exist_ok=True)
        template = (model / "chat_template.jinja").read_text(encoding="utf-8")
        template = f"{{% if tools %}}{{{{ tools[0].function.name }}}}{{% endif %}}{template.rstrip()}<think>\n\n"
        template = template.replace("'assistant']", "'assistant', 'tool']")
        (model / "chat_template.jinja").write_text(template, encoding="utf-8")
        places = (f"model.path={model}", f"run.dir={tmp_path / 'run'}", "data.limit=4")
        config = load(None, [*places, "rewards.functions={think_format: 1, exact_match: 1}", *settings])
        commands.train(config, dry_run=True)
        return capsys.readouterr().out.replace("\n", " ")

    return run


def test_a_dry_run_writes_nothing_and_pays_an_answer_behind_the_thought_that_the_template_opens(
    dry_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = dry_run("server.urls=[http://up,http://down]")
    assert "the reference answer of " in said
    assert "scored as if the model had written it, gets {" in said
    assert r": 'a thought\n</think>\n\n" in said
    assert "'think_format': 1.0" in said
    assert "nothing stands in the way of a run" in said
    assert "4 prompts to train on, 64 held out" in said
    assert "rollout.prompts_per_step=16 with 4 prompts: each step repeats some; lower it" in said
    assert not (tmp_path / "run").exists()
    assert "step=16 is no multiple of algorithm.minibatches=5: updates" in dry_run("algorithm.minibatches=5")
    odd = dry_run("trainer.warmup_steps=125")
    assert "trainer.warmup_steps=125 outlasts the 100 steps: the learning rate ends at 80% of its peak; lower it" in odd
    assert "server http://up has the same model and tokenizer, and answers" in said
    assert "no server answers at http://down yet" in said
    assert "and answers" in dry_run("server.urls=[http://up]", "model.random_init=true", architecture="?")
    assert "a run, as far as is seen without a server" in dry_run("server.urls=[http://down]")
    monkeypatch.setattr(vllm_arguments, "engine_arguments", Mock(side_effect=ConfigError("no such engine argument")))
    with pytest.raises(ConfigError, match="no such engine argument"):
        dry_run("server.engine.foo=1")  # of the server that would be started
    assert "nothing stands" in dry_run("server.engine.foo=1", "server.urls=[http://up]")


def test_no_episode_outgrows_a_micro_batch_and_one_too_small_for_a_turn_ends_the_start(tmp_path: Path) -> None:
    settings = (f"run.dir={tmp_path}", f"model.path={ROOT}/checkpoints/tiny-sort", "rollout.max_tokens=16")
    config = load(None, [*settings, "data.limit=4"])
    with commands.Console(1) as console:
        parts = commands.Parts.make(config, console)
        loaded = parts.load(compare=False)
        needed = 16 + max(len(prompt.token_ids) for prompt in loaded.training[""])
        assert parts.longest > needed == loaded.needed
        trainer: Any = SimpleNamespace(micro_batch_tokens=needed - 1)  # as trainer.micro_batch_tokens=auto may find
        parts.check_fits(needed, trainer)
        assert parts.longest_episode(trainer) == needed  # the last token is only predicted
        with pytest.raises(ConfigError, match=f"may have {needed} tokens, but {needed - 1} fit: set trainer.gradient_"):
            parts.check_fits(needed, SimpleNamespace(micro_batch_tokens=needed - 2))


@pytest.mark.parametrize(("updated", "status"), [(0, 3), (1, 0)])
def test_a_run_without_an_update_ends_with_status_3(
    updated: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def train(run: object) -> dict[str, int]:
        return {"updated": updated}

    monkeypatch.setattr(commands, "_run", lambda *_: None)
    monkeypatch.setattr(commands, "_train", train)
    monkeypatch.setattr(commands.Console, "finish", lambda *_: None)
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", raising=False)
    assert commands.train(load(None, [f"run.dir={tmp_path}/a"])) == status
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "75"  # torch reads it before the first weight group


def test_a_start_that_fails_after_servers_were_claimed_frees_them_for_other_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer()

    def run(made: commands.Parts, *arguments: Any) -> None:
        run_there = arguments[-1]
        run_there(made.servers.wait_for_gpu())
        raise ConfigError("the trainer does not fit")

    monkeypatch.setattr(commands, "_run", run)
    monkeypatch.setattr("hocket.commands.servers.visible_gpus", lambda: ["0"])
    monkeypatch.setattr("hocket.client.pool.ServerClient", lambda url, **options: server)
    config = load(None, [f"run.dir={tmp_path}/a", f"model.path={SORT}", "launch.gpus_apart=false"])
    with pytest.raises(ConfigError, match="does not fit"):
        commands.train(config)
    assert (server.beats[0], server.beats[-1]) == ((False, False), (False, True))


def test_an_async_reward_that_can_not_be_set_up_ends_the_start_before_a_server_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    @reward("broken")
    class Broken:
        async def __aenter__(self) -> None:
            raise OSError("no weights")

        async def __aexit__(self, *exc_info: object) -> None: ...

        async def __call__(self, completion: str) -> None: ...

    for name in ("servers_as_they_are", "own_server", "trainer"):
        monkeypatch.setattr(commands.Parts, name, lambda *_: pytest.fail("a server or the trainer was asked for"))
    monkeypatch.setattr(Servers, "wait_for_gpu", lambda *_, **__: pytest.fail("a server was waited for"))
    request.addfinalizer(lambda: REWARDS.forget("broken"))
    settings = [f"run.dir={tmp_path}/a", f"model.path={ROOT}/checkpoints/tiny-sort", "data.limit=4"]
    settings.append("rewards.functions={broken: 1}")
    train = lambda settings: commands.train(load(None, settings), serve=True)  # noqa: E731
    for command in (commands.roll_out, commands.evaluate_checkpoint, train):
        with pytest.raises(RewardError, match="reward 'broken' can't be set up: OSError: no weights"):
            command(settings)
    assert not (tmp_path / "a" / "ledger.jsonl").exists()


def test_a_resume_that_is_refused_leaves_the_records_behind_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(kept: object) -> None:
        pytest.fail("the records were cut off")

    saved = SimpleNamespace(step=1, folder=tmp_path, trainer={}, restore=cut_off)
    trainer = SimpleNamespace(description="little", micro_batch_tokens=3, restore=lambda *_: None)
    monkeypatch.setattr(commands.checkpoints, "find", lambda *_, **__: saved)
    monkeypatch.setattr("hocket.trainer.trainer.Trainer", lambda _: nullcontext(trainer))
    settings = [f"run.dir={tmp_path}/a", f"model.path={ROOT}/checkpoints/tiny-sort", "data.limit=4"]
    with pytest.raises(ConfigError, match="tokens, but 4 fit"):
        commands.train(load(None, settings))


def test_python_gives_the_command_settings_and_rewards_and_gets_what_the_run_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = []

    def train(config: Config, *, serve: bool, on_step: object) -> None:
        rewards = [bind(name, spec).runs for name, spec in config.rewards.functions.items()]
        got.append((config.trainer.steps, config.trainer.seed, serve, *rewards))

    async def slow(answer: str) -> None: ...

    def mine(completion: str) -> float:
        return 1.0

    monkeypatch.setattr(commands, "train", train)
    (tmp_path / "weights" / "v000002").mkdir(parents=True)
    (tmp_path / "summary.json").write_text('{"steps": 1}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    values = {"run": {"dir": str(tmp_path)}, "trainer": {"seed": 1}}
    (tmp_path / "a.yaml").write_text(json.dumps(values))
    for config in (tmp_path / "a.yaml", str(tmp_path / "a.yaml"), values, load(None, values)):
        result = hocket.train(config, {"trainer.steps": 5}, rewards={"mine": mine, "slow": slow})
    assert got == [(5, 1, True, "inline", "async")] * 4
    model = tmp_path / "weights" / "v000002"
    assert result == {"steps": 1, "run_dir": tmp_path, "model": model, "history": [{"step": 1}]}
    assert values == {"run": {"dir": str(tmp_path)}, "trainer": {"seed": 1}}
    with pytest.raises(ConfigError, match=r"reward mine.*needs the option 'text': set rewards.functions.mine.text"):
        hocket.train(values, rewards={"mine": lambda text: 1.0})  # the cell that defines it runs again
    with pytest.raises(ConfigError, match="reward 'math' is registered twice"):
        hocket.train(values, rewards={"math": mine})
    with pytest.raises(ConfigError, match=r"rewards takes .name: function."):
        hocket.train(values, rewards=[mine])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there is no reward 'mine'"):
        REWARDS.get("mine")


def test_a_dry_run_looks_up_servers_and_shares_no_gpu_with_one_that_is_up(dry_run: Any, tmp_path: Path) -> None:
    file = tmp_path / "servers"
    assert f"server.discover={file} finds no server" in dry_run(f"server.discover={file}")
    file.write_text("http://up\n", encoding="utf-8")
    assert "server http://up has the same model" in dry_run(f"server.discover={file}")
    assert "nothing stands in the way" in dry_run("launch.share_gpu=true", "server.urls=http://down")
    with pytest.raises(ConfigError, match=r"the server holds the GPU of launch\.share_gpu: stop it"):
        dry_run("launch.share_gpu=true", "server.urls=http://up")


REWARDS_OF_USERS = """
from hocket.rewards import reward

@reward("needs_level", inline=True)
def needs_level(completion, meta):
    return meta["level"]

@reward("says", inline=True)
def says(completion):
    return "good"

@reward("compares", inline=True)
def compares(completions):
    return [float(one > other) for one, other in zip(completions, completions[1:] + completions[:1], strict=True)]

@reward("pays", inline=True)
def pays(completion, answer=None):
    return float(answer is None and completion == "")

@reward("asks")
async def asks(completion):
    raise AssertionError("a dry run calls no service")
"""


def test_a_dry_run_fails_where_a_reward_has_no_score_and_calls_no_service(
    dry_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(REWARDS_OF_USERS)
    plugin = f"plugins=[{tmp_path}/mine.py]"
    write_rows(tmp_path / "other.jsonl", {"prompt": "a", "answer": "b"})
    other = f"data.sources=[task:sort, {{source: {tmp_path}/other.jsonl, rewards: {{needs_level: 1}}}}]"
    for settings, said in (
        (["rewards.functions={needs_level: 1}"], "needs_level: KeyError: 'level'"),
        (["rewards.functions={exact_match: 1, says: 1}"], "says: returned str instead of a number"),
        (["rewards.functions={exact_match: 1}", other, "eval.num_prompts=0"], "needs_level: KeyError: 'level'"),
    ):
        with pytest.raises(RewardError, match=r"has no score, as said above; mend .*reward-test --samples FILE CONFIG"):
            dry_run("server.urls=[http://up]", plugin, *settings)
        assert f"has no score: {said}" in capsys.readouterr().out.replace("\n", " ")
    told = dry_run(plugin, "rewards.functions={compares: 1, asks: 1}")
    assert "not tried, as an async reward may ask a service: asks" in told
    assert "gets {'compares': 0.0}" in told
    assert "nothing stands in the way" in told
    assert "nothing stands in the way" in dry_run(plugin, "rewards.functions={asks: 1}")
    none = "data.answer_column=null"
    assert "gets {'pays': 1.0}" in dry_run(plugin, "rewards.functions={pays: 1}", none, "model.path=" + str(SORT))
    for functions in ("{exact_match: 1}", "{pays: 1, countdown: 1}"):
        with pytest.raises(ConfigError, match=r"takes the answer, but data\.answer_column=null: name the column"):
            dry_run(plugin, f"rewards.functions={functions}", none)
    with pytest.raises(ConfigError, match=r"reward exact_match takes the answer, but eval\.data\.answer_column=null"):
        dry_run(plugin, "rewards.functions={pays: 1}", "eval.reward=exact_match", none)


@pytest.mark.parametrize(
    ("other", "settings", "says"),
    [
        ({"architecture": "Qwen3ForCausalLM 0"}, "", "architecture Qwen3ForCausalLM 0, this run Qwen2ForCausalLM b5a3"),
        ({"tokenizer_sha256": "0"}, "", "the tokenizer 0, this run .*: start both with the same model.path"),
        ({"root": "/else"}, "", "versions /else, this run /.*: start both with the same sync.root, or set sync.upload"),
        ({"max_length": 99}, "rollout.max_tokens=90", "sequence 99, this run .*: start both with the same model.max_l"),
        ({"max_adapter_rank": 8}, "model.lora={}", "rank of adapters 8, this run 16: start both with the same model.l"),
        ({}, "server.token=not-its-token", "answered 401"),
        ({}, "observe.loggers=tensorboard", "tensorboard"),
        ({}, "pipeline.replay=nowhere", "no rollouts of step 100 in nowhere/rollouts/step_000100.jsonl"),
        ({}, "sync.root=nowhere", "must lie under sync.root=.*nowhere, in no hidden folder"),
        ({}, "run.dir=used", "used holds a run of 3 steps already; choose another run.dir"),
        ({}, "run.dir=used/metrics.jsonl/a", "Not a directory"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(
    other: dict[str, Any], settings: str, says: str, dry_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used/metrics.jsonl").write_text('{"step": 3}\n')
    given = settings.split()
    with pytest.raises((HocketError, OSError), match=says):
        dry_run("server.urls=[http://up]", *given, **other)
    if other:  # where no version is read from a folder, or a server can take more, it is no other
        more = {"max_length": 1024, "max_adapter_rank": 64, "root": other.get("root", str(tmp_path))}
        assert "nothing stands" in dry_run("server.urls=[http://up]", "sync.upload=true", *given, **more)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "env"),
    [
        (["rewards.functions={env: 1}"], "single_turn"),
        (["rewards.functions={env: 0, exact_match: 1}"], "single_turn"),  # every score would lack it
        (["eval.reward=env"], "single_turn"),
        (["rewards.functions={env: 1}", "env={name: single_turn, thinking_tokens: 8}"], "single_turn"),
        (
            ["data.sources=[{source: task:sort}, {name: calls, source: task:calculate, rewards: {env: 1}}]"],
            "single_turn",
        ),
    ],
)
def test_a_dry_run_refuses_the_reward_of_an_environment_that_gives_none(
    settings: list[str], env: str, dry_run: Any
) -> None:
    with pytest.raises(ConfigError, match=f"the reward env has no value, as env.name={env} gives none: name another"):
        dry_run(*settings)


def test_credit_per_turn_needs_the_reward_of_an_environment(dry_run: Any) -> None:
    own = ["algorithm.credit=step_groups", "rewards.functions={exact_match: 1}"]
    with pytest.raises(ConfigError, match=r"needs rewards of turns .*: add rewards\.functions\.env"):
        dry_run(*own)


@pytest.mark.parametrize(
    ("gpus", "settings", "ahead", "broadcasts"),
    [
        ("", [], 0, False),
        ("0", [], 0, False),  # a server here may be on the same one
        ("1", ["launch.gpus_apart=true"], 1, True),
        ("0", ["launch.gpus_apart=false", "server.urls=[http://10.0.0.5:8000]"], 0, False),
        ("0", ["server.urls=[http://10.0.0.5:8000]"], 1, True),
        ("0", ["server.host=0.0.0.0", "server.token=known-to-both"], 0, False),  # of this machine, by another name
        ("0", [f"server.urls=[http://{socket.gethostname()}:8000]"], 0, False),
        ("0", ["server.discover=gpus.example:8000"], 1, True),
        ("", ["server.urls=[http://10.0.0.5:8000]"], 0, False),  # CPUs: results stay those of one machine
        ("0", ["server.urls=[http://10.0.0.5:8000]", "sync.backend=disk", "pipeline.max_staleness=0"], 0, False),
        ("", ["sync.backend=nccl", "pipeline.max_staleness=2"], 2, True),
        ("0", ["launch.share_gpu=true", "server.urls=[http://10.0.0.5:8000]"], 0, False),
    ],
)
def test_with_gpus_apart_batches_overlap_and_weights_are_broadcast(
    gpus: str, settings: list[str], ahead: int, broadcasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("HOCKET_DEVICE", "cuda")  # else a machine without a driver has no GPU
    config = load(None, settings).chosen(on_gpu=bool(visible_gpus()))
    assert (config.pipeline.max_staleness, config.sync.backend) == (ahead, "nccl" if broadcasts else "disk")


def test_the_example_of_on_step_ends_a_run_whose_loss_is_no_number() -> None:
    names: dict[str, Any] = {"OnStepPart": commands.OnStepPart}
    exec(shown(commands, "part = OnStepPart"), names)
    assert names["is_last_step"] is True
    assert names["part"].ends(2, {"train/loss": 0.5}) is False
