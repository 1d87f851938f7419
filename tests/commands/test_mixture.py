import json
import math
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hocket.client.batcher import Turn
from hocket.client.pool import Deadline
from hocket.commands import sources as sources_module
from hocket.commands.parts import Parts
from hocket.commands.runs import _shape
from hocket.commands.sources import reward_calls
from hocket.common.registry import load_plugins
from hocket.config import Config, load, to_yaml
from hocket.envs.base import ENVIRONMENTS, Action, Environment, Observation, Step, environment
from hocket.errors import ConfigError
from hocket.observe.console import Console
from hocket.observe.metrics import rollout_metrics
from hocket.observe.rows import groups_of, lines_of
from hocket.protocol import Completion
from hocket.rollout.collect import Plan, collect
from hocket.rollout.evaluate import measured
from hocket.types import Group, Prompt, Score
from support import fakes
from support.batches import SAMPLING
from support.records import group, sequence, write_rows

ROOT = Path(__file__).resolve().parents[2]
MIXTURE = ROOT / "config" / "mixture.yaml"


def config(*settings: str) -> Config:
    found = load(MIXTURE, [f"model.path={ROOT}/checkpoints/tiny-tools", "data.limit=40", *settings])
    load_plugins([f"{ROOT}/config/tiny_tools.py"])
    return found


def test_a_source_has_what_it_does_not_say_from_the_sections_of_the_run() -> None:
    found = config("rollout.max_tokens=70", "data.max_prompt_tokens=30")
    guess, calculate, sort = (found.sources[name] for name in ("guess", "calculate", "sort"))
    assert [*found.sources] == ["guess", "calculate", "sort"]
    assert (guess.data.source, guess.data.limit, guess.data.max_prompt_tokens) == ("task:guess", 40, 30)
    assert [one.env.name for one in (guess, calculate, sort)] == ["guess", "tools", "single_turn"]
    assert [one.max_tokens for one in (guess, calculate, sort)] == [4, 70, 16]
    assert [one.eval_reward for one in (guess, calculate, sort)] == ["env", "exact_match", "position_match"]
    assert sort.held_out is not None
    assert (sort.held_out.source, sort.held_out.split) == ("task:sort", "test")
    assert load().sources == {"": load().default_source}


def test_a_source_says_itself_how_its_held_out_answers_are_measured() -> None:
    found = config("eval.reward=position_match", "eval.max_tokens=9")
    measured = [(one.eval_reward, one.eval_max_tokens) for one in found.sources.values()]
    assert measured == [("position_match", 9)] * 3
    assert [one.pass_reward for one in found.sources.values()] == ["env", "exact_match", "position_match"]
    assert [one.eval_max_tokens for one in config().sources.values()] == [4, 80, 16]
    assert [one.held_out for one in config("eval.num_prompts=0").sources.values()] == [None] * 3


def test_a_group_is_shaped_by_its_source_and_a_replayed_one_of_no_source_by_the_run() -> None:
    shaped = _shape(config("algorithm.overlong_share=1"))
    scores = [Score(total=1.0, parts={"position_match": 0.5, "exact_match": 0.25})] * 2
    for source, max_tokens, passes in (("sort", 16, 0.5), ("of another run", 80, 0.25)):
        prompt = Prompt(id="a", token_ids=(1,), source=source)
        made = shaped(group(prompt, [sequence(2, 2, 2, 2)] * 2, scores))
        assert [one.penalty for one in made.scored] == [4 / max_tokens] * 2
        assert made.passes == (passes, passes)


def test_a_mixture_reads_back_from_what_the_run_folder_keeps(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(config().as_dict()))
    assert load(tmp_path / "config.yaml") == config()


def test_other_weights_are_another_run() -> None:
    before = config().as_dict()  # whose keys of data may not change (trainer/checkpoints.py)
    assert [*config("data.sources=[{source: task:sort, weight: 2}]").changes(before)] == ["data.sources"]


def test_rewards_of_turns_are_asked_of_each_source_alone() -> None:
    turns = "{source: a.jsonl, rewards: {env: 1}}"
    load(None, [f"data.sources=[{turns}]", "algorithm.credit=turn"])
    with pytest.raises(ConfigError, match=r"data\.sources, sort: .*needs rewards of turns as they are given: add"):
        load(None, [f"data.sources=[{turns}, task:sort]", "algorithm.credit=turn"])


def test_it_is_said_that_nothing_is_evaluated_where_no_source_has_held_out_rows() -> None:
    said: list[str] = []
    model = f"model.path={ROOT}/checkpoints/tiny-sort"
    for sources in ("[task:sort, a.jsonl]", "[a.jsonl, b.jsonl]"):
        with Console(1) as console:
            console.say = said.append  # type: ignore[method-assign]
            mixed = Parts.make(load(None, [f"data.sources={sources}", model, "eval.num_prompts=2"]), console)
            assert len(mixed.held_out().prompts) == (2 if "task:" in sources else 0)
    (once,) = [line for line in said if "nothing is evaluated" in line]
    assert "held_out of data.sources" in once


def test_held_out_rows_that_no_evaluation_reads_are_left_out_of_training_too(tmp_path: Path) -> None:
    for name, numbers in (("train", range(8)), ("test", range(4, 8))):
        rows = [{"prompt": f"Sort: {number}", "answer": f"{number}"} for number in numbers]
        write_rows(tmp_path / f"{name}.jsonl", *rows)
    settings = [f"data.source={tmp_path}/train.jsonl", f"eval.data.source={tmp_path}/test.jsonl", "eval.num_prompts=1"]
    settings += ["data.exclude_overlap=true", f"model.path={ROOT}/checkpoints/tiny-sort"]
    with Console(1) as console:
        loaded = Parts.make(load(None, settings), console).load()
    assert ([prompt.answer for prompt in loaded.training[""]], len(loaded.held_out)) == (["0", "1", "2", "3"], 1)


def test_a_set_of_weight_0_is_only_held_out(tmp_path: Path) -> None:
    sources = "[task:sort, {weight: 0, held_out: other/aime.jsonl}, {name: x, source: a.jsonl, held_out: task:sort}]"
    found = load(None, [f"data.sources={sources}", "checkpoint.best=eval/aime/greedy"])
    held_out = [source.held_out for source in found.sources.values()]
    assert [*found.sources] == ["sort", "aime", "x"]
    assert [data and data.source for data in held_out] == ["task:sort", "other/aime.jsonl", "task:sort"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.sources=[task:sort, task:sort]"], "two sources are called sort: give each a name"),
        (["data.sources=[task:sort]", "data.source=a.jsonl"], "source=a.jsonl beside sources: name it in that list"),
        (["data.sources=[{source: task:sort, weight: 0}]"], "no source has a weight above 0: give one to train on"),
        (["data.sources=[task:sort]", "eval.data.source=a.jsonl"], "each of these has its own held_out"),
        (["data.sources=[a.jsonl]", "checkpoint.best=eval/greedy"], "checkpoint.best needs held-out rows"),
        (["data.sources=[task:sort]", "checkpoint.best=eval/NOSUCH/greedy"], "which has .*eval/sort/greedy"),
        (["data.sources=[a.jsonl, b/a.jsonl]"], "two sources are called a: give each a name"),
        (["data.sources=[{name: a b, source: a.jsonl}]"], "a source is called 'a b', as metrics are named"),
        (["data.sources=[{name: a/b, source: a.jsonl}]"], "a source is called 'a/b'"),
        (["data.sources=[.jsonl]"], "a source is called ''"),
        (["data.sources=[{source: a.jsonl, split: test}]"], "leave it out of a file"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(None, settings)


def test_the_name_of_a_source_can_stand_in_that_of_a_metric() -> None:
    found = load(None, ['data.sources=["my rows/two words.jsonl", "hf:org/chat-1:part b", "task:sort"]'])
    assert [*found.sources] == ["two_words", "part_b", "sort"]


class Engine:
    """Answers what its source is asked: a guess, a call of the tool and what it told, the letters as they stand."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.asked: list[tuple[str, int]] = []

    async def ask(self, turn: Turn) -> Completion:
        text = self.tokenizer.decode(turn.token_ids)
        kind = next(word for word in ("Guess", "Sort", "calculate") if word in text)
        self.asked.append((kind, turn.sampling.max_tokens))
        said = {"Guess": "10", "Sort": "abcd", "calculate": "7"}[kind]
        ids = (*self.tokenizer(said)["input_ids"], self.tokenizer.eos_token_id)
        return fakes.completion(*ids, logprobs=(-1.0,) * len(ids), text=said)


async def test_one_batch_has_each_source_with_its_environment_reward_and_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in has the place of the environment with tools."""

    @environment("calculate_of_mixture")
    class Calculate(Environment):
        async def reset(self, prompt: Prompt, seed: int) -> Observation:
            return Observation(messages=[{"role": "tool", "content": "calculate"}])

        async def step(self, action: Action) -> Step:
            return Step(done=True)

    sources = yaml.safe_load(MIXTURE.read_text(encoding="utf-8"))["data"]["sources"]
    (own,) = [source for source in sources if source.get("env", {}).get("name") == "tools"]
    own["env"] = {"name": "calculate_of_mixture", "max_turns": 3}
    try:
        await check_batch(config(f"data.sources={json.dumps(sources)}", "eval.num_prompts=2"), monkeypatch)
    finally:
        ENVIRONMENTS.forget("calculate_of_mixture")


async def check_batch(settings: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks a batch and an evaluation of the three sources."""
    with Console(1) as console, Parts.make(settings, console, lambda source: source.reward_names) as mixed:
        engine = Engine(mixed.tokenizer)
        monkeypatch.setattr(sources_module, "Batcher", lambda servers, tools: engine)
        loaded = mixed.load()
        servers: Any = SimpleNamespace(members=[])
        plan = Plan(label="s", sampling=SAMPLING, group_size=2, wanted=20, at_most=20, deadline=Deadline(60.0))
        plays = mixed.plays(servers, mixed.longest)
        batch = await collect(plan, loaded.stream.take, mixed.training_play(plays), mixed.scorer())
        evaluation = mixed.evaluation(loaded.held_out, plays)
        metrics, groups = await evaluation.run("eval")
    of = {name: next(one for one in batch.groups if one.source == name) for name in settings.sources}
    parts = {name: [*one.scores[0].parts] for name, one in of.items()}
    assert parts == {"guess": ["env"], "calculate": ["exact_match"], "sort": ["position_match"]}
    assert of["guess"].rollouts[0].sequences[0].turns > 1 or of["guess"].scores[0].total == 1
    assert {length for kind, length in engine.asked if kind == "Guess"} <= {1, 2, 3, 4}
    assert dict(engine.asked) | {"Guess": 4} == {"Guess": 4, "Sort": 16, "calculate": 80}
    assert of["sort"].rollouts[0].prompt.id.startswith("sort/task:sort/train:")
    found = rollout_metrics(batch.groups)
    assert sum(found[f"source/{name}/share"] for name in settings.sources) == pytest.approx(1)
    assert found["source/sort/reward/mean"] == found["reward/position_match"]
    assert [one.source for one in groups] == ["guess"] * 2 + ["calculate"] * 2 + ["sort"] * 2
    each = [metrics[f"eval/{name}/greedy"] for name in settings.sources]
    assert metrics["eval/greedy"] == pytest.approx(sum(each) / 3)
    (again,) = groups_of(lines_of([of["sort"]]).splitlines())
    assert (again.source, again.rollouts[0].prompt.source) == ("sort", "sort")  # for a replay


def test_sources_with_the_same_rewards_share_what_calls_them() -> None:
    found = load(None, ["data.sources=[{name: a}, {name: b}, {name: c, rewards: {exact_match: 0.5}}]"])
    with ExitStack() as stack:
        calls = reward_calls(stack, found, lambda source: source.reward_names)
        assert calls["a"] is calls["b"] is not calls["c"]
        assert calls["c"].specs["exact_match"].weight == 0.5


def test_a_measured_reward_has_its_options_also_where_a_source_is_trained_by_others() -> None:
    rewards = "rewards.functions={exact_match: 1, length: {weight: 0, target: 40}}"
    sources = "data.sources=[{name: a}, {name: b, rewards: {exact_match: 1}}]"
    found = load(None, [rewards, sources, "eval.reward=length"])
    with ExitStack() as stack:
        calls = reward_calls(stack, found, lambda source: source.reward_names)
        assert [*calls["b"].specs] == ["exact_match", "length"]
        assert calls["b"].rewards["length"].options == calls["a"].rewards["length"].options
        assert calls["b"].specs["length"].model_extra == {"target": 40}


def held_out(source: str, *marks: int | Score) -> list[Group]:
    """Returns held-out groups, whose answers had these rewards, or scores."""
    prompt, name = Prompt(id=source, token_ids=(1,), source=source), f"of_{source}"
    scores = [Score(total=mark, parts={name: mark}) if isinstance(mark, int) else mark for mark in marks]
    return [group(prompt, [sequence(2)], [score]) for score in scores]


def test_a_held_out_set_without_any_score_leaves_the_others_their_numbers() -> None:
    failed = Score(total=math.nan, error="the judge is down")
    found = measured([*held_out("a", 1, 0), *held_out("b", failed)], {"a": "of_a", "b": "of_b"}, 1.0)
    assert (found["eval/greedy"], found["eval/b/reward_errors"]) == (0.5, 1.0)
    assert "eval/b/greedy" not in found


def test_the_mean_of_held_out_sets_counts_each_once_and_has_its_own_standard_error() -> None:
    groups = [*held_out("a", 1, 1, 0, 0), *held_out("b", 1, 0)]
    found = measured(groups, {"a": "of_a", "b": "of_b"}, 1.0)
    errors = math.sqrt((1 / 3) / 4), math.sqrt((1 / 2) / 2)  # variances 1/3 of four, 1/2 of two
    assert (found["eval/a/greedy"], found["eval/b/greedy"], found["eval/greedy"]) == (0.5, 0.5, 0.5)
    assert found["eval/a/greedy_stderr"] == pytest.approx(errors[0])
    assert found["eval/greedy_stderr"] == pytest.approx(math.hypot(*errors) / 2)
