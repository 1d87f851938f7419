"""What `train --dry-run` says of tools."""

from typing import Any

import pytest

from hocket.errors import ConfigError, HocketError

TOOLS = "{name: tools, tools: [calculate], parser: hermes}"


def test_a_dry_run_refuses_a_parser_that_vllm_lacks(dry_run: Any) -> None:
    with pytest.raises(HocketError, match="vLLM's tool parser 'hermess' can't be used"):
        dry_run("server.urls=[http://up]", "env.name=tools", "env.tools=calculate", "env.parser=hermess")


def test_a_dry_run_refuses_the_reward_of_tools_which_give_none(dry_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"the reward env has no value, as env\.name=tools gives none: name another"):
        dry_run("rewards.functions={env: 1}", f"env={TOOLS}")


def test_credit_per_turn_goes_without_the_reward_of_an_environment_that_gives_turns_none(
    dry_run: Any,
) -> None:
    own = ["algorithm.credit=step_groups", "rewards.functions={exact_match: 1}"]
    assert "nothing stands in the way" in dry_run(*own, f"env={TOOLS}")
