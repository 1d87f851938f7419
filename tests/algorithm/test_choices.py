"""An algorithm's functions are chosen by name, and yours are a file under plugins."""

import math
from pathlib import Path

import pytest
import torch

from hocket.algorithm import choices
from hocket.algorithm.advantages import group_advantages
from hocket.algorithm.choices import choose
from hocket.algorithm.samples import shape
from hocket.common.registry import load_plugins
from hocket.config import LossConfig
from hocket.errors import ConfigError
from support.batches import loss_of
from support.examples import plugged, shown
from support.samples import MAX_TOKENS, algorithm, group_of, make_rollout, sampled

MINE = """
from hocket.algorithm.choices import advantage, correction

@advantage("rank", per="group")
def rank(rewards_g, power: float = 1.0):
    below_g = (rewards_g[:, None] > rewards_g).sum(1)
    above_g = (rewards_g[:, None] < rewards_g).sum(1)
    signed_g = (below_g - above_g).double() / max(len(rewards_g) - 1, 1)
    return signed_g.sign() * signed_g.abs() ** power

@advantage("over_batch", per="batch")
def over_batch(rewards_n, group_n):
    return rewards_n - rewards_n.mean() + group_n

@advantage("part", per="batch")
def part(parts_n, of: str):
    return parts_n[of].nan_to_num(-9.0)

@advantage("count_parts", per="batch")
def count_parts(rewards_n, parts_n):
    return rewards_n * 0 + len(parts_n)

@advantage("all_alone", per="token")
def all_alone(rewards_t):
    return rewards_t.sum()

@advantage("last_alone", per="token")
def last_alone(rewards_t):
    return rewards_t

@correction("root")
def root(log_importance_bt, power: float = 0.5):
    return (log_importance_bt * power).exp()
"""


@pytest.fixture(scope="module", autouse=True)
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own_algorithm.py"
    file.write_text(MINE)
    load_plugins([str(file)])
    return file


def test_an_own_advantage_of_the_group_has_its_options_and_is_divided_by_scale() -> None:
    # ranks −1, 0, 1 | −1, 1, and their squares; deviation of 0, 3, 9: √21
    rewards = [0.0, 3.0, 9.0, 5.0, 7.0]
    found = group_advantages(rewards, [0, 0, 0, 1, 1], advantage={"name": "rank", "power": 2}, scale="none")
    assert found.tolist() == [-1.0, 0.0, 1.0, -1.0, 1.0]
    scaled = group_advantages(rewards[:3], [0, 0, 0], advantage="rank", scale="group")
    assert scaled.tolist() == pytest.approx([-1 / math.sqrt(21), 0.0, 1 / math.sqrt(21)])  # beside 1e-6 of 4.6


def test_an_own_advantage_of_the_batch_gets_all_rewards_and_the_numbers_of_their_groups() -> None:
    found = group_advantages([1.0, 2.0, 6.0], [0, 0, 1], advantage="over_batch", scale="none")
    assert found.tolist() == [-2.0, -1.0, 4.0]
    parts = [{"a": 1.0}, {"a": 2.0}, {"b": 3.0}]  # sources of a mixture have others
    assert group_advantages([1.0, 2.0, 6.0], [0, 0, 1], advantage="over_batch", scale="none", parts=parts).equal(found)


def test_an_own_advantage_gets_the_parts_of_the_rewards_nan_where_a_source_has_no_such_one() -> None:
    rollouts = [make_rollout(-1.0)] * 2
    groups = [group_of(*rollouts, rewards=[{name: 1.0}, {name: 2.0}]) for name in ("a", "b")]
    for name, expected in (("a", [1.0, 2.0, -9.0, -9.0]), ("b", [-9.0, -9.0, 1.0, 2.0])):
        samples, _ = sampled(groups, algorithm(f"advantage={{name: part, of: {name}}}", "scale=none"))
        assert [sample.advantages[-1] for sample in samples] == expected
    # what scale divides by is the deviation of a group's rewards, √2, not that of its parts
    part, alone = {"name": "part", "of": "a"}, [{"a": 0.0}, {"a": 8.0}]
    scaled = group_advantages([0.0, 2.0], [0, 0], advantage=part, scale="group", parts=alone)
    assert scaled.tolist() == pytest.approx([0.0, 8 / math.sqrt(2)])  # beside 1e-6


def test_parts_are_the_reward_functions_alone_not_what_they_add_up_or_only_tell() -> None:
    parts = [{"judge": 0.5, "judge/dollars": 100.0, "judge/1": 0.5}] * 2
    assert group_advantages([0.5, 0.5], [0, 0], advantage="count_parts", scale="none", parts=parts).tolist() == [1, 1]


NOT_FINITE = "returned {} as advantage {}: have it handle equal rewards, a single reward, and reward functions that"


@pytest.mark.parametrize(
    ("per", "returns", "message"),
    [
        ("group", "rewards_g / (rewards_g - 1)", NOT_FINITE.format("inf", "1 of 2")),
        ("group", "rewards_g.log() * 0", NOT_FINITE.format("nan", "2 of 2")),
        ("group", "rewards_g.mean()", r"returned the shape \[\] for 2 advantages: have it return one for each"),
        ("group", "rewards_g[:, None]", r"returned the shape \[2, 1\] for 2 advantages"),
        ("group", "rewards_g[:1]", r"returned 1 for 2 advantages"),
        ("group", "None", "returned NoneType: have it return a tensor of 2 numbers"),
        ("batch", "rewards_n * float('nan')", NOT_FINITE.format("nan", "1 of 2")),
        ("batch", "[1.0, 2.0, 3.0]", "returned 3 for 2 advantages"),
        ("token", "rewards_t[1:]", "returned 1 for 2 advantages"),
        ("token", "rewards_t / 0", NOT_FINITE.format("nan", "1 of 2")),
        ("token", "(rewards_t, rewards_t / 0)", NOT_FINITE.format("nan", "1 of 2")),
    ],
)
def test_an_own_advantage_that_is_not_finite_or_has_another_shape_is_refused_by_its_name(
    per: str, returns: str, message: str, tmp_path: Path
) -> None:
    name = f"wrong_{tmp_path.name}"
    argument = {"group": "rewards_g", "batch": "rewards_n", "token": "rewards_t"}[per]
    file = tmp_path / "wrong.py"
    file.write_text(
        "from hocket.algorithm.choices import advantage\n"
        f"@advantage('{name}', per='{per}')\ndef wrong({argument}):\n    return {returns}\n"
    )
    load_plugins([str(file)])
    group = group_of(*[make_rollout(-1.0, -1.0)] * 2, rewards=[1.0, 0.0])
    with pytest.raises(ConfigError, match=rf"algorithm\.advantage={name} {message}"):
        sampled([group], algorithm(f"advantage={name}", "scale=none"))


def test_numbers_that_were_not_finite_before_are_no_fault_of_the_advantage() -> None:
    measured = [{"ref_logprobs": [0.0, 0.0, math.nan]}] * 2
    own = algorithm("advantage=last_alone", "scale=none", "kl=k1", "kl_in=reward", "kl_coef=0.5")
    samples, _ = sampled([group_of(*[make_rollout(-1.0)] * 2, rewards=[1.0, 0.0])], own, measured, 0.5)
    assert all(math.isnan(sample.advantages[-1]) for sample in samples)  # the trainer's guard names ref_logprobs


@pytest.mark.parametrize(("name", "expected"), [("last_alone", [0.0, 2.0]), ("all_alone", [2.0, 2.0])])
def test_an_own_advantage_per_token_gets_the_rewards_of_the_tokens_and_needs_no_spread(
    name: str, expected: list[float]
) -> None:
    alike = group_of(*[make_rollout(-1.0, -1.0)] * 2, rewards=[2.0, 2.0])
    own = algorithm(f"advantage={name}", "scale=none")
    assert shape(alike, own, MAX_TOKENS).reason is None
    assert [list(sample.advantages) for sample in sampled([alike], own)[0]] == [[0.0, 0.0, *expected]] * 2
    assert shape(alike, algorithm("advantage=rank"), MAX_TOKENS).reason == "every reward is 2"


def test_the_advantage_and_the_objective_that_their_decorators_show_are_plugins(tmp_path: Path) -> None:
    head = "from hocket.algorithm.choices import advantage, objective\n\n"
    above = head + shown(choices, '@advantage("above"')
    with plugged(tmp_path, above, (choices.KINDS["advantage"], "above")):
        chosen = {"name": "above", "quantile": 1.0}
        found = group_advantages([0.0, 3.0, 9.0], [0, 0, 0], advantage=chosen, scale="none")
        assert found.tolist() == [-9.0, -6.0, 0.0]
    capped = head + shown(choices, '@objective("capped"')
    with plugged(tmp_path, capped, (choices.KINDS["objective"], "capped")):
        choice = choose("objective", {"name": "capped", "most": 3})
        ratios, advantages = torch.tensor([[0.5, 9.0]]), torch.tensor([[2.0, 2.0]])
        assert choice(ratio_bt=ratios, advantages_bt=advantages).tolist() == [[1.0, 6.0]]
        assert choice.clips == "ratio"


def test_an_own_correction_is_the_weight_of_each_token() -> None:  # test_examples.py has objectives, aggregates, KLs
    config = LossConfig(correction={"name": "root", "power": 0.25}, aggregate="token_mean")
    rollout, mask = torch.tensor([[-1.0, -2.0]]).double(), torch.ones(1, 2, dtype=torch.bool)
    advantages = torch.tensor([[3.0, -1.0]]).double()
    output = loss_of(rollout + math.log(16), rollout, advantages, mask, config=config, num_tokens=2)
    assert output.loss.item() == pytest.approx(-2 * (3.0 - 1.0) / 2)  # 16 to the power of 1/4; every ratio is 1


@pytest.mark.parametrize("bounds", [(0.5, 1.0), (1.0, 2.0)])
@pytest.mark.parametrize("name", ["mask", "sequence_mask"])
def test_a_weight_at_a_bound_is_kept(name: str, bounds: tuple[float, float]) -> None:
    known = {"log_importance_bt": torch.zeros(1, 1), "mask_bt": torch.ones(1, 1), "sample_bt": torch.tensor([[0]])}
    assert choose("correction", {"name": name, "bounds": bounds})(**known).tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("advantage=rnk", r"there is no advantage 'rnk' \(did you mean 'rank'\?\); known: .*critic, .*; add your own"),
        ("objective=pp0", "there is no objective 'pp0'"),
        ("aggregate=token_men", "there is no aggregate 'token_men'"),
        ("correction=msk", "there is no correction 'msk'"),
        ("credit=step_group", "there is no credit 'step_group'"),
        ("advantage=over_batch;credit=turn", "compares turns of a group, algorithm.advantage=over_batch does not"),
        ("preset=distill", "algorithm.preset=distill needs a teacher: set algorithm.reference"),
        ("advantage={name: rank, powr: 2}", r"advantage rank\(rewards_g, power\) has no option 'powr' \(did you mean"),
        ("advantage={name: rank, power: x}", "algorithm.advantage.power: must be a number, got 'x'"),
        ("objective={name: ppo, dual_clip: 1}", "algorithm.objective.dual_clip: Input should be greater than 1"),
        ("advantage={name: none, discount: -1};scale=none", "algorithm.advantage.discount: Input should be gr"),
        ("advantage={name: none, gae_lambda: 1};scale=none", r"advantage none.* has no option 'gae_lambda'"),
        ("correction={name: truncate, bounds: [5, 0.5]}", r"bounds: .*\[lowest, highest\]"),
        ("objective={name: cispo, dual_clip: 3}", "objective cispo.* has no option 'dual_clip'"),
        ("advantage=none", "advantage=none compares no rollouts: set algorithm.scale to tokens or none"),
        ("advantage=critic;scale=batch", "set algorithm.scale to tokens or none"),
        ("advantage=last_alone", "advantage=last_alone compares no rollouts"),
        ("kl=k1;kl_coef=0.1", "set algorithm.kl_in=reward, or algorithm.kl=k2"),
    ],
)
def test_what_can_not_be_chosen_or_does_not_fit_is_refused_with_the_fix(settings: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choices.check(algorithm(*settings.split(";")), group_size=8)


def test_one_rollout_leaves_a_group_nothing_to_compare_with() -> None:
    with pytest.raises(ConfigError, match=r"rollout.group_size=1 leaves algorithm.advantage=mean nothing"):
        choices.check(algorithm(), group_size=1)
    choices.check(algorithm(), group_size=2)
    choices.check(algorithm("preset=reinforce_pp"), group_size=1)
    choices.check(algorithm("advantage=critic", "scale=none", "credit=turn", "correction=none"), group_size=1)


def test_a_choice_without_options_is_its_name_in_a_config_that_is_written() -> None:
    own = algorithm("advantage={name: rank}", "objective={name: ppo, dual_clip: 3}")
    assert (own.advantage, own.objective) == ("rank", {"name": "ppo", "dual_clip": 3})
    assert choose("objective", own.objective).options == {"dual_clip": 3.0}
