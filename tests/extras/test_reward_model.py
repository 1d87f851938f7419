"""Reward models of random weights, held against transformers called by hand, one completion at a time."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from tests.rewards.test_vision import RED, seeing
from tokenizers import processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hocket.errors import ConfigError
from hocket.types import Rollout
from support.episodes import Scorers, make_rollout
from support.numbers import rounding
from support.tokenizers import CHARACTERS, make_tokenizer

TEMPLATE = "{% for m in messages %}{{ '^' if m.role == 'assistant' else '#' }}{{ m.content }}<eos>{% endfor %}"
SIZES = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.5, "pad_token_id": 0}
TEXTS = ["abcd", "a", "dcba dcba", ""]
CLOSE = 8 * rounding(2 * (6 * 16 + 64 + 32) + 32)
"""How far two logits may lie apart. On the way are, in each of two layers, four products with 16 numbers, two norms,
attention over at most 64 tokens, and a product with 32; then norm and head, whose sum of 16 products of weights around
0.5 with numbers around 1 is 8 at most."""


def made(folder: Path, kind: str, *, template: str | None = None, **changes: Any) -> str:
    """Writes a model, and a tokenizer of characters that pads on the left, as a generator's may."""
    words = ["<pad>", "<eos>", "<unk>", "<sep>", *map(chr, range(33, 123))]
    special: dict[str, Any] = {"eos_token": "<eos>", "unk_token": "<unk>", "padding_side": "left"}
    if kind == "Bert":
        special["sep_token"] = "<sep>"
    tokenizer = make_tokenizer(words, template, split=CHARACTERS, **special)
    if kind == "Bert":
        ends: Any = {"single": "$A <sep>", "pair": "$A <sep> $B:1 <sep>:1", "special_tokens": [("<sep>", 3)]}
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**ends)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | {"num_labels": 1} | changes))
    model = getattr(transformers, f"{kind}{changes.pop('head', 'ForSequenceClassification')}")(config)
    model.save_pretrained(folder)
    return str(folder)


PAGE = (Path(__file__).parents[2] / "docs/how-to/judge.md").read_text("utf-8").split("## Score with a reward model")[1]
SHOWN = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])["rewards"]["functions"]["reward_model"]
DOCUMENTED = SHOWN | {"device": "cpu", "max_length": None}


@torch.no_grad()
def by_hand(path: str, rollout: Rollout) -> torch.Tensor:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    chat = [*rollout.prompt.messages, {"role": "assistant", "content": rollout.text}]  # type: ignore[misc]
    if tokenizer.chat_template:
        inputs = tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt")
    elif tokenizer.sep_token:
        inputs = tokenizer([rollout.prompt.text], [rollout.text], return_tensors="pt")
    else:
        inputs = tokenizer(rollout.prompt.text + rollout.text, return_tensors="pt")
    logits: torch.Tensor = model.eval()(**inputs).logits[0]
    return logits


@pytest.mark.parametrize(
    ("kind", "changes", "options", "read"),
    [
        ("Qwen2", {"template": TEMPLATE}, DOCUMENTED, lambda logits: logits[0]),
        ("Qwen2", {"template": TEMPLATE}, {"batch_size": 1}, lambda logits: logits[0]),
        ("Qwen2", {"template": TEMPLATE, "pad_token_id": None}, {}, lambda logits: logits[0]),
        ("Qwen2", {"template": TEMPLATE, "pad_token_id": -1}, {}, lambda logits: logits[0]),
        ("Qwen2", {"template": TEMPLATE, "pad_token_id": 95}, {}, lambda logits: logits[0]),  # no token's
        ("Qwen2", {}, {"batch_size": 3, "probability": True}, lambda logits: logits.sigmoid()[0]),
        ("Bert", {}, {}, lambda logits: logits[0]),
        ("Bert", {"num_labels": 3}, {"label": 2}, lambda logits: logits[2]),
        ("Bert", {"num_labels": 3}, {"label": 0, "probability": True}, lambda logits: logits.softmax(-1)[0]),
    ],
)
async def test_a_group_gets_what_transformers_gives_each_completion_alone(
    scorer_of: Scorers,
    tmp_path: Path,
    kind: str,
    changes: dict[str, Any],
    options: dict[str, Any],
    read: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    path, rollouts = made(tmp_path, kind, **changes), [make_rollout(text) for text in TEXTS]
    scores = await scorer_of({"reward_model": options | {"path": path}}, timeout_s=1e-9).score_group(rollouts)
    expected = [float(read(by_hand(path, rollout))) for rollout in rollouts]
    assert max(expected) - min(expected) > 0.01
    assert [score.total for score in scores] == pytest.approx(expected, abs=CLOSE)


async def test_what_is_too_long_or_can_not_be_encoded_is_an_error_and_the_others_have_their_scores(
    scorer_of: Scorers, tmp_path: Path
) -> None:
    path = made(tmp_path, "Qwen2", template=TEMPLATE)
    # "#Be brief.<eos>#Sort: dbca<eos>^" and "<eos>" are 23 tokens: the tokenizer knows no space
    rollouts = [make_rollout(text) for text in ("a" * 41, "a" * 42, "a\ud800", "b")]
    whole, long, half, short = await scorer_of({"reward_model": {"path": path}}).score_group(rollouts)
    assert "have 65 tokens, more than the 64 that" in str(long.error)
    assert "TextEncodeInput" in str(half.error)
    expected = [float(by_hand(path, rollouts[i])[0]) for i in (0, 3)]
    assert [whole.total, short.total] == pytest.approx(expected, abs=CLOSE)
    scores = await scorer_of({"reward_model": {"path": path, "max_length": 24}}).score_group(rollouts)
    assert [score.error is None for score in scores] == [False, False, False, True]


async def test_a_model_whose_positions_begin_behind_the_padding_reads_as_many_fewer(
    scorer_of: Scorers, tmp_path: Path
) -> None:
    path = made(tmp_path, "Roberta", pad_token_id=1, type_vocab_size=2)  # 64 positions, of which the first is 2
    whole, long = await scorer_of({"reward_model": {"path": path}}).score_group(
        [make_rollout("a" * 52), make_rollout("a" * 53)]  # behind the 10 of "Sort: dbca"
    )
    assert (whole.error, "more than the 62 that" in str(long.error)) == (None, True), (whole, long)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"num_labels": 2}, {}, "has 2 labels: set label to the index of one"),
        ({}, {"label": 1}, "has 1 labels: set label"),
        ({}, {"batch_size": 0}, "model.batch_size: Input should be greater than or equal to 1"),
        ({}, {"dtype": "float33"}, r"model.dtype: Input should be 'auto', .* \(did you mean 'float32'\?\)"),
        ({"head": "ForCausalLM"}, {}, "is no sequence classifier: .*Qwen2ForCausalLM"),
        ({}, {"path": "no/such/model"}, "rewards.functions.reward_model.path=no/such/model: there is no such folder"),
    ],
)
def test_a_model_that_can_not_score_is_refused_at_the_start(
    scorer_of: Scorers, tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    path = made(tmp_path, "Qwen2", **changes)
    with pytest.raises(ConfigError, match=message):
        scorer_of({"reward_model": {"path": path} | options})


async def test_a_reward_model_gives_no_score_where_there_is_an_image(scorer_of: Scorers, tmp_path: Path) -> None:
    scorer = scorer_of({"reward_model": {"path": made(tmp_path, "Qwen2", template=TEMPLATE)}})
    seen, read = await scorer.score_group([seeing(make_rollout(), RED), make_rollout()])
    assert "reads text alone, and the prompt has images: leave out rewards.functions.reward_model" in str(seen.error)
    assert read.error is None
