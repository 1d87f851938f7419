"""The files of examples/algorithms: equal to TRL's own code, and no longer than a page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.algorithm.advantages import group_advantages
from hocket.algorithm.choices import check
from hocket.common.registry import load_plugins
from hocket.config import LossConfig, load
from hocket.errors import ConfigError
from support.batches import loss_of
from support.numbers import rounding

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "algorithms").glob("*.py"))
RECORDED = json.loads((Path(__file__).parent / "trl.json").read_text(encoding="utf-8"))  # by record_trl.py
AS_RECORDED: dict[str, dict[str, Any]] = {
    "sapo": {"objective": {"name": "sapo", "negative": 1.0625}, "aggregate": "seq_mean_token_mean"},
    "vespo": {"objective": "vespo", "aggregate": "token_mean"},
    "luspo": {"ratio": "sequence", "aggregate": "luspo", "clip_low": 0.05, "clip_high": 0.05},
    "gmpo": {"objective": "gmpo", "aggregate": "seq_mean_token_mean"},
    "off_policy_mask": {"objective": "off_policy_mask"},
    "unbiased_kl": {"kl": "unbiased_kl", "kl_coef": 0.3},
    "high_entropy": {"objective": {"name": "high_entropy", "share": 0.4}},
    "adaptive_entropy": {"objective": {"name": "adaptive_entropy", "target": 1.0}},
}
AWAY = 10 * rounding(100, torch.float64)
"""Of sums of 42 tokens' terms behind means of 7, each below 10."""


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    load_plugins(list(map(str, FILES)))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_is_short_and_names_its_paper_and_settings(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    assert re.search(r"\(.*arXiv \d{4}\.\d{4,5}\)", text.splitlines()[0])
    assert re.search(rf"^Settings: .*\b{file.stem}\b", text, re.M)


def test_there_are_ten_and_each_that_trl_has_is_compared() -> None:
    assert {file.stem for file in FILES} == {*AS_RECORDED, "gdpo", "by_rank"}
    assert RECORDED["cases"].keys() == AS_RECORDED.keys()


@pytest.mark.parametrize("name", AS_RECORDED)
def test_loss_and_gradients_equal_those_of_trl(name: str) -> None:
    given = {key: torch.tensor(value, dtype=torch.float64) for key, value in RECORDED["inputs"].items()}
    rows, tokens = given["logprobs"].shape
    mask = torch.arange(tokens) < given["lengths"][:, None]
    logprobs, entropies = (given[key].requires_grad_() for key in ("logprobs", "entropies"))
    case = RECORDED["cases"][name]
    config = LossConfig(**({"correction": "none", "clip_low": 0.2, "clip_high": 0.28} | AS_RECORDED[name]))
    for expected in case["loss"]:
        output = loss_of(
            logprobs,
            given["rollout"],
            given["advantages"][:, None].expand(rows, tokens),
            mask,
            config=config,
            num_tokens=int(mask.sum()),
            num_sequences=rows,
            entropy=entropies,
            sample=torch.arange(rows)[:, None].expand(rows, tokens).where(mask, -1),
            old_logprobs=given["old"],
            ref_logprobs=given["reference"],
        )
        assert output.loss.item() == pytest.approx(expected, abs=AWAY)
    found = torch.autograd.grad(output.loss, (logprobs, entropies), allow_unused=True, materialize_grads=True)
    for gradient, of in zip(found, ("gradient", "entropy_gradient"), strict=True):
        torch.testing.assert_close(gradient, torch.tensor(case[of], dtype=torch.float64), rtol=0, atol=AWAY)
    assert found[0].abs().sum() > 0


@pytest.mark.parametrize("case", ["gdpo", "gdpo_mixed"])
def test_gdpo_equals_trl_also_where_rollouts_lack_a_reward(case: str) -> None:
    names = ("first", "second")
    rows = zip(*RECORDED[case]["parts"], strict=True)
    parts = [{name: part for name, part in zip(names, row, strict=True) if part is not None} for row in rows]
    found = group_advantages(
        [0.0] * 8,
        [0, 0, 0, 0, 1, 1, 1, 1],
        advantage={"name": "gdpo", "weights": {"second": 0.5}},
        scale="none",
        parts=parts,
    )
    # Ours are rounded to float32, and so are the factors n / (n - 1) of TRL's deviations; numbers are below 2.
    assert found.tolist() == pytest.approx(RECORDED[case]["advantages"], abs=2 * 2**-23)


def test_ranks_are_those_of_the_rewards() -> None:
    found = group_advantages([0.0, 9.0, 3.0, 3.0], [0] * 4, advantage="by_rank", scale="none")
    assert found.tolist() == pytest.approx([-1.0, 1.0, 0.0, 0.0])


def test_a_kl_that_needs_the_ratio_is_refused_in_the_reward() -> None:
    settings = ["algorithm.kl=unbiased_kl", "algorithm.kl_coef=0.1", "algorithm.scale=none"]
    check(load(None, settings).algorithm, 8)
    with pytest.raises(
        ConfigError, match=r"algorithm\.kl=unbiased_kl needs the policy's ratio: set algorithm\.kl_in=loss"
    ):
        check(load(None, [*settings, "algorithm.kl_in=reward"]).algorithm, 8)
