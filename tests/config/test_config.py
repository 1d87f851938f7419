"""One YAML file, overrides, and answers that name the key."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from hocket import config
from hocket.config.algorithm import PRESETS, PresetName
from hocket.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def load(tmp_path: Path, text: str, *overrides: str) -> config.Config:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return config.load(file, overrides)


def algorithm(*overrides: str) -> config.AlgorithmConfig:
    return config.load(None, [f"algorithm.{override}" for override in overrides]).algorithm


def test_a_preset_fills_what_is_not_set_and_the_resolved_config_shows_it(tmp_path: Path) -> None:
    loaded = load(tmp_path, "algorithm: {preset: gspo, clip_high: 0.1}\n", "algorithm.advantage=leave_one_out")
    found = loaded.algorithm
    assert (found.preset, found.ratio, found.clip_low, found.clip_high) == ("gspo", "sequence", 3e-4, 0.1)
    assert (found.advantage, found.aggregate, found.correction) == ("leave_one_out", "seq_mean_token_mean", "none")
    shown = yaml.safe_load(config.to_yaml(loaded.as_dict()))["algorithm"]
    assert (shown["ratio"], shown["clip_low"]) == ("sequence", 3e-4)


@pytest.mark.parametrize("name", get_args(PresetName))
def test_every_preset_is_a_config_that_reads_back_and_a_row_of_the_table(tmp_path: Path, name: PresetName) -> None:
    loaded = config.load(None, [f"algorithm.preset={name}"])
    row = PRESETS[name].knobs
    assert {key: getattr(loaded.algorithm, key) for key in row} == row
    assert load(tmp_path, config.to_yaml(loaded.as_dict())) == loaded
    assert f"\n| `{name}` |" in config.preset_table()


def test_a_presets_kl_can_be_switched_off_and_without_a_group_one_rollout_is_enough() -> None:
    for word in ("off", "'off'"):
        assert algorithm("preset=reinforce_pp", f"kl={word}").kl == "off"
    assert config.load(None, ["rollout.group_size=1", "algorithm.preset=reinforce_pp"]).rollout.group_size == 1


def test_every_shipped_config_loads_and_names_what_exists() -> None:
    files = [*ROOT.glob("config/**/*.yaml"), *ROOT.glob("examples/**/*.yaml")]
    assert {"quickstart.yaml", "gsm8k_1gpu.yaml", "vlm_qwen2_5_3b_1gpu.yaml"} <= {path.name for path in files}
    for file in files:
        loaded = config.load(file)
        held_out = loaded.default_source.held_out or loaded.data
        for path in (loaded.data.source, held_out.source, *loaded.plugins):
            if path.endswith((".jsonl", ".parquet", ".py")) and not path.startswith("runs/"):  # of the stage before
                assert (ROOT / path).is_file(), path
        if loaded.model.path.startswith("checkpoints/"):
            assert (ROOT / loaded.model.path / "config.json").is_file()


def test_the_held_out_rows_are_read_like_the_others_unless_eval_data_says_otherwise(tmp_path: Path) -> None:
    text = "data: {source: 'hf:a/b:main', prompt_column: q, answer_pattern: '(x)', limit: 9, split: half}\n"
    loaded = load(tmp_path, text, "eval.data.split=test")
    held_out = loaded.default_source.held_out
    assert held_out is not None
    again = load(tmp_path, config.to_yaml(loaded.as_dict()))
    assert (again, again.default_source.held_out) == (loaded, held_out)
    found = (held_out.source, held_out.split, held_out.prompt_column, held_out.limit, held_out.section)
    assert found == ("hf:a/b:main", "test", "q", None, "eval.data")
    other = load(tmp_path, text, "eval.data.source=held.jsonl", "eval.data.prompt_column=prompt", "eval.data.limit=2")
    held_out = other.default_source.held_out
    assert held_out is not None
    assert (held_out.source, held_out.prompt_column, held_out.limit) == ("held.jsonl", "prompt", 2)
    assert held_out.answer_pattern == re.compile("(x)")
    again = load(tmp_path, config.to_yaml(other.as_dict()), "data.prompt_column=z")  # the run's own file says it all
    assert again.default_source.held_out == held_out
    with pytest.raises(ConfigError, match=r"eval\.data: system_prompt needs chat_template: true"):
        config.load(None, ["data.system_prompt=Think.", "eval.data.chat_template=false"])


@pytest.mark.parametrize(
    "settings",
    [
        ("data.source=train.jsonl",),
        ("data.source=train.jsonl", "eval.data.split=test"),  # a file has no splits
        ("data.source=hf:a/b",),  # it may have no split test
        ("data.source=hf:SAVED", "eval.data.split=test"),
        ("data.split=test",),  # of task:sort
        ("eval.num_prompts=0",),
    ],
)
def test_training_rows_are_not_taken_for_held_out_ones(settings: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "state.json").touch()  # of a dataset that was saved, without splits
    loaded = config.load(None, [setting.replace("SAVED", str(tmp_path)) for setting in settings])
    assert loaded.default_source.held_out is None
    assert load(tmp_path, config.to_yaml(loaded.as_dict())).default_source.held_out is None
    assert config.load(None).default_source.held_out is not None


def test_an_override_changes_neither_what_shares_an_anchor_nor_the_callers_own_values(tmp_path: Path) -> None:
    text = "data: &rows {source: a.jsonl, chat_template: {x: 1}}\neval: {data: {<<: *rows, source: b.jsonl}}\n"
    loaded = load(tmp_path, text, "data.limit=4", "data.chat_template.x=2")
    assert (loaded.data.limit, loaded.data.chat_template) == (4, {"x": 2})
    assert (loaded.eval.data.limit, loaded.eval.data.chat_template) == (None, {"x": 1})
    loaded = load(tmp_path, text.replace("{<<: *rows, source: b.jsonl}", "*rows"), "eval.data.source=b.jsonl")
    assert (loaded.data.source, loaded.eval.data.source) == ("a.jsonl", "b.jsonl")
    given = {"trainer": {"steps": 7}}
    assert config.load(None, {**given, "trainer.steps": 9}).trainer.steps == 9
    assert given == {"trainer": {"steps": 7}}


def test_values_come_from_defaults_then_file_then_overrides(tmp_path: Path) -> None:
    loaded = load(tmp_path, "trainer: {steps: 7, seed: 3}\n", "trainer.steps=9", "run.dir=runs/a")
    assert (loaded.trainer.steps, loaded.trainer.seed, loaded.trainer.max_grad_norm) == (9, 3, 1.0)
    assert loaded.run_dir == Path("runs/a")
    assert load(tmp_path, "# nothing\n") == config.Config()


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("trainer.learning_rate=1e-6", 1e-6),
        ("trainer.zero_stage=null", None),
        ("trainer.betas=[0.9, 0.95]", (0.9, 0.95)),
        ("data.answer_pattern=#### x=(.*)", re.compile("#### x=(.*)")),
        ("run.dir=runs/exp #3", "runs/exp #3"),  # text is taken as it stands
        ("run.dir=010/a", "010/a"),
        ("run.dir=~/runs/a", "/home/somebody/runs/a"),
    ],
)
def test_an_override_is_yaml_or_text(override: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    section, key = override.partition("=")[0].split(".")
    assert getattr(getattr(config.load(overrides=[override]), section), key) == value


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("-7", -7),
        ("TRUE", True),
        ("~", None),
        ("", None),
        ("off", "off"),  # the rest is no text in YAML 1.1
        ("010", "010"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("'1e-6'", "1e-6"),
    ],
)
def test_an_option_is_what_yaml_1_2_says_in_a_file_or_on_the_command_line_and_reads_back(
    written: str, read: object, tmp_path: Path
) -> None:
    nested = f"{{x: {written}, y: [{written}]}}" if written else "{x: , y: [null]}"
    for loaded in (
        load(tmp_path, f"env: {nested}"),
        config.load(None, [f"env={nested}"]),
        config.load(None, [f"env.x={written}", f"env.y=[{written or 'null'}]"]),
    ):
        assert loaded.env.model_extra == {"x": read, "y": [read]}
        assert load(tmp_path, config.to_yaml(loaded.as_dict())) == loaded


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        ("algorithm.correction=[]", "algorithm.correction: must be a name, or {name: NAME, option: value}"),
        ("algorithm.ratio=sequence", "set correction=none"),
        ("algorithm.kl_in=reward", "have no effect; set kl or leave them out"),
        ("algorithm.kl_in=rewards", "algorithm.kl_in: Input should be 'loss' or 'reward' (did you mean 'reward'?)"),
        ("algorithm.kl=k2", "kl=k2 needs a weight"),
        ("algorithm.kl=k1 algorithm.kl_coef=0.1 algorithm.kl_in=reward", "with kl_in=reward set another scale"),
        ("trainer.micro_batch_tokens=1", "trainer.micro_batch_tokens: Input should be greater than or equal to 2"),
        ("model.lora.targets=[]", "model.lora.targets: Value should have at least 1 item"),
        ("data.chat_template=3", "data.chat_template: must be true or false, got 3 ("),
        ("eval.data.sauce=x", "unknown key 'eval.data.sauce'; did you mean 'eval.data.source'?"),
        ("learning_rate=1", "did you mean 'critic.learning_rate' or 'trainer.learning_rate'?"),
        ("zzzz=1", "unknown key 'zzzz'; `python run.py config --reference` lists all"),
        ("trainer.temperature=1", "did you mean 'rollout.temperature' or 'eval.temperature'?"),
        ("trainer.learning_rate=nan", "trainer.learning_rate: Input should be a finite number"),
        ("algorithm.preset=dapo env.thinking_tokens=9", "overlong_share=0.2 would punish the thoughts"),
        ("rewards.functions={}", "rewards.functions: Dictionary should have at least 1 item"),
        ("run.dir=", "run.dir: the path is empty: is a shell variable not set?"),
        ("server.urls=localhost:8000", "server.urls.0: must begin with http:// or https:// and a host, got 'localhost"),
        ("server.urls=http://:8000", "must begin with http:// or https:// and a host"),
        ("server.discover=servers", "server: discover=servers is neither NAME:PORT nor a file with a slash"),
        ("server.discover=server:65536", "server: discover=server:65536 is neither NAME:PORT nor a file"),
        ("server.discover=a:1 server.urls=http://a:1", "discover and urls both name the servers: leave one out"),
        ("pipeline.replay=runs/default", "this run's own folder"),
        ("trainer.steps", "overrides look like section.key=value"),
        ("trainer.steps=[1", "not valid YAML: expected ',' or ']'"),
        ("data.answer_pattern=x", "data: answer_pattern needs a group (...) around the answer"),
        ("data.answer_pattern=(x) data.answer_column=null", "data: answer_pattern needs answer_column"),
        ("data.system_prompt=x data.chat_template=false", "data: system_prompt needs chat_template: true"),
        ("model.lora={} model.random_init=true", "with random_init there are none"),
        ("model.lora.quantize=nf4 trainer.offload_optimizer=true", "set stage 2"),
        ("checkpoint.best=eval/greedy data.source=a.jsonl", "checkpoint.best needs held-out rows: set eval.data"),
        (
            "checkpoint.best.name=eval/greedy checkpoint.best.patience=3 eval.every_steps=0",
            "checkpoint.best.patience has no effect, as only the last step is evaluated: set eval.every_steps",
        ),
        ("algorithm.preset=ppo critic.warmup_steps=10 trainer.steps=10", "leaves no step of trainer.steps=10"),
        ("trainer.offload_optimizer=true trainer.zero_stage=0", "offload_optimizer needs zero_stage"),
        ("launch.share_gpu=true pipeline.max_staleness=1", "needs pipeline.max_staleness=0"),
        ("launch.share_gpu=true sync.backend=delta", "needs sync.backend=disk: whole versions are written"),
        ("launch.share_gpu=true sync.backend=nccl", "NCCL can't connect two processes on one GPU"),
        ("launch.share_gpu=true server.urls=[http://a:1,http://b:1]", "one server"),
        ("launch.share_gpu=true launch.servers=2", "is for one server; give several GPUs of their own"),
        ("launch.share_gpu=true server.discover=a:1", "is for one server that server.urls names: leave server.disc"),
        ("launch.share_gpu=true launch.gpus_apart=true", "launch.share_gpu contradicts launch.gpus_apart=true"),
    ],
)
def test_a_mistake_is_answered_with_its_name_or_the_fix(overrides: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, overrides.split(" "))
    assert answer in str(caught.value)
    if overrides.startswith("launch.share_gpu"):
        config.load(None, overrides.split(" ")[1:])


def test_a_mistake_is_blamed_on_the_file_or_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "trainer: {steps: 0, sed: 1}\n", "trainer.stps=1", "rollout.group_size=0")
    assert [line.partition(": ")[0] for line in str(caught.value).splitlines()] == [
        "command line", str(file), str(file), "command line"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=f"^{file}: sync.backend=delta has no effect with model.lora"):
        load(tmp_path, "sync: {backend: delta}\n", "model.lora={}")
    for text, answer in (
        ("- a\n", f"{file} must be a mapping of sections, got list"),
        ("a: [\n", rf"(?s)can't read the config {file}: .* in \"{file}\", line 2"),
        ("trainer: 3\n", "'trainer' is not a section"),
    ):
        with pytest.raises(ConfigError, match=answer):
            load(tmp_path, text, "trainer.steps=1")


def test_a_reward_may_be_a_weight_alone_or_have_arguments_and_the_accuracy_is_the_pass_rate() -> None:
    loaded = config.load(overrides=["rewards.functions={math: 0.5, length: {weight: 0.1, target: 40}}"])
    assert loaded.rewards.functions["math"].weight == 0.5
    assert loaded.rewards.functions["length"].model_extra == {"target": 40}
    for accuracy, passes in (("length", "length"), ("null", "math"), ("exact_match", "math")):  # if it is trained
        settings = ["rewards.functions={math: 0.5, length: 0.1}", f"eval.reward={accuracy}"]
        assert config.load(None, settings).default_source.pass_reward == passes
    weights = {"{gate: yes}": 0.0, "{gate: true, weight: 2}": 2.0, "{gate: false}": 1.0, "{}": 1.0}  # of a gate 0
    for written, weight in weights.items():
        assert config.load(overrides=[f"rewards.functions.x={written}"]).rewards.functions["x"].weight == weight


def test_the_token_comes_from_config_or_environment_and_a_weak_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_TOKEN", "from-environment")
    assert config.Config().token == "from-environment"
    loaded = config.load(overrides=["server.token=from-config"])
    assert loaded.token == "from-config"
    assert "from-config" not in config.to_yaml(loaded.as_dict())
    monkeypatch.setenv("HOCKET_TOKEN", "")
    assert config.Config().token is None
    for weak in ("short", "pässwörter", "two\nlines"):
        monkeypatch.setenv("HOCKET_TOKEN", weak)
        with pytest.raises(ConfigError, match="at least 8 plain ASCII characters"):
            config.load()


@pytest.mark.parametrize(
    ("overrides", "urls"),
    [
        (["server.host=::1", "server.port=9"], ("http://[::1]:9",)),
        (["server.urls=https://gpu.example/hocket/"], ("https://gpu.example/hocket",)),
        (["server.urls=[http://a:1, http://b:2/, http://a:1/]"], ("http://a:1", "http://b:2")),
        (["server.urls=[]", "server.port=9"], ("http://127.0.0.1:9",)),
        (["server.urls=http://0.0.0.0:8000/"], ("http://127.0.0.1:8000",)),  # TRL's default host
        (
            ["server.urls=['http://[::]:9', http://0.0.0.0.example/0.0.0.0]"],
            ("http://[::1]:9", "http://0.0.0.0.example/0.0.0.0"),
        ),
        (["server.discover=server:65535"], ()),
        (["server.discover=./servers"], ()),
    ],
)
def test_the_servers_are_those_named_or_the_one_of_this_config(overrides: list[str], urls: tuple[str, ...]) -> None:
    assert config.load(overrides=overrides).server_urls == urls


def test_versions_are_published_under_the_parent_of_the_run_folder_symlinks_resolved(tmp_path: Path) -> None:
    assert config.load(overrides=["run.dir=runs/a"]).sync_root == Path("runs").resolve()
    for settings in (["run.dir=runs/.hidden"], ["run.dir=runs/a", "sync.root=elsewhere"]):
        with pytest.raises(ConfigError, match=r"must lie under sync.root=.*, in no hidden folder"):
            config.load(None, settings).refuse_outside()
    (tmp_path / "real" / "a").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "a")
    assert config.load(None, [f"run.dir={tmp_path}/link"]).sync_root == tmp_path / "real"


def test_an_adapter_is_off_until_asked_for_and_has_defaults(tmp_path: Path) -> None:
    assert config.Config().model.lora is None
    assert load(tmp_path, "model: {lora: {}}").model.lora == config.LoraConfig()
    for one in ("q_proj", "[q_proj]"):
        named = load(tmp_path, "model: {lora: null}", f"model.lora.targets={one}")
        assert named.model.lora == config.LoraConfig(targets=("q_proj",))
        assert load(tmp_path, config.to_yaml(named.as_dict())) == named


def test_the_former_name_of_a_setting_is_answered_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm.clip'; it is 'algorithm.objective' now"):
        load(tmp_path, "algorithm: {clip: ppo}\n")


def test_a_run_of_before_is_gone_on_with_whose_config_has_former_names(tmp_path: Path) -> None:
    now = load(tmp_path, "algorithm: {objective: cispo}\n")
    before = now.as_dict()
    before["algorithm"]["clip"] = before["algorithm"].pop("objective")
    assert now.changes(before) == {}


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(config.__path__)])
def test_the_examples_of_the_docstrings_give_what_they_show(name: str) -> None:
    module = importlib.import_module(f"hocket.config.{name}")
    assert doctest.testmod(module).failed == 0


def test_some_docstrings_have_examples() -> None:
    modules = [importlib.import_module(f"hocket.config.{name}") for name in ("loading", "whole", "sections")]
    assert all(doctest.testmod(module).attempted for module in modules)


# 1e-6 · (8e9 / parameters)^(2/3): 1e-6, 1e-6 · 8^(2/3) = 4e-6, 1e-6 · 59.47^(2/3) = 1.5e-5, and ten times that.
@pytest.mark.parametrize(
    ("parameters", "has_adapter", "rate"),
    [
        (8_000_000_000, False, 1e-6),
        (1_000_000_000, False, 4e-6),
        (134_515_008, False, 1.5e-5),
        (134_515_008, True, 1.5e-4),
    ],
)
def test_a_rate_that_is_left_open_follows_the_model_s_size(parameters: int, has_adapter: bool, rate: float) -> None:
    trainer = config.TrainerConfig()
    assert trainer.learning_rate == "auto"
    assert trainer.with_rate(parameters, has_adapter=has_adapter).learning_rate == rate
    chosen = config.TrainerConfig(learning_rate=3e-6)
    assert chosen.with_rate(parameters, has_adapter=has_adapter).learning_rate == 3e-6


@pytest.mark.parametrize("key", ["model.path", "algorithm.reference", "critic.path"])
def test_a_run_stands_for_its_newest_version_and_a_url_for_itself(key: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number in (3, 12):
        version = run / "weights" / f"v{number:06d}"
        version.mkdir(parents=True)
        (version / "COMPLETE").touch()
    (run / "config.yaml").touch()
    (run / "metrics.jsonl").touch()
    section, name = key.split(".")
    loss = {"algorithm.kl": "k3", "algorithm.kl_coef": 0.1}
    for value, meant in ((str(run), str(run / "weights" / "v000012")), ("http://a:8000", "http://a:8000")):
        assert config.load(None, {**loss, key: value}).as_dict()[section][name] == meant
