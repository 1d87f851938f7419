"""Names of settings in other programs."""

import re

import pytest

from hocket import config
from hocket.commands.cli import main
from hocket.errors import ConfigError
from hocket.extras.elsewhere import NAMES_ELSEWHERE


def test_every_name_from_elsewhere_leads_to_a_setting_and_is_none_here() -> None:
    keys = set(re.findall(r"^\| `([a-z_.]+)`", config.reference(), re.MULTILINE))
    keys |= {"eval.data.source", "env.max_turns"}
    for here, there in NAMES_ELSEWHERE.items():
        assert set(re.findall(r"\w+\.[\w.]+", here)) <= keys, here
        assert not [name for name in there.split() for key in keys if f".{key}".endswith(f".{name}")]
    names = " ".join(NAMES_ELSEWHERE.values()).split()
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        ("critic.optim.lr=1e-5", "unknown key 'critic.optim.lr'; here that is critic.learning_rate"),
        ("actor_rollout_ref.actor.clip_ratio=1 actor_rollout_ref.rollout.n=4", "n'; here that is rollout.group_size"),
        ("rollout.top_p=0.9", "here that is no setting: training samples from the whole distribution"),
    ],
)
def test_a_name_of_another_program_is_answered_by_the_setting(overrides: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, overrides.split(" "))
    assert answer in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("train --num_generations 8", "--num_generations; here that is rollout.group_size; settings have no dashes"),
        (
            "train --max-steps=8 trainer.seed=1",
            "here that is trainer.steps; settings have no dashes: section.key=value",
        ),
        ("report --num_generations 8 runs/a", "unrecognized arguments: --num_generations"),
    ],
)
def test_an_option_of_another_program_is_answered_by_the_setting(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(typed.split())
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("key", ["report_to", "trainer.logger", "use_wandb"])
def test_another_program_s_choice_of_loggers_is_answered_by_the_setting(key: str) -> None:
    with pytest.raises(ConfigError, match=r"observe\.loggers"):
        config.load(None, [f"{key}=wandb"])
