"""Shared prefixes (trainer.share_prefixes): the same numbers as packing, from fewer positions."""

import functools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.conftest import SIZES
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from hocket.config import ModelConfig
from hocket.config.algorithm import PRESETS
from hocket.trainer import attention, batching, prefixes
from hocket.trainer.attention import attend
from hocket.trainer.critic import ValueModel
from hocket.trainer.packing import Sizes
from hocket.trainer.policy import Policy
from hocket.trainer.prefixes import SharingPacker
from hocket.trainer.ranks import Ranks
from hocket.types import TrainSample
from support import training
from support.parameters import mostly_long
from support.training import assert_near, assert_same_metrics, assert_same_states, pack, sample_of, sequence, untimed

BEGIN = tuple(range(10, 22))


def group(*endings: tuple[int, ...], prompt: tuple[int, ...] = BEGIN) -> list[TrainSample]:
    return [sample_of(sequence([*prompt, *ending], len(prompt))) for ending in endings]


def test_a_hand_worked_group_reads_its_prompt_once() -> None:
    samples = group((1, 2, 3), (4, 5), (1, 2, 3))  # 12 + 3 - 1 = 14 positions, 13, and the first one again
    [[batch]] = pack(samples, share=math.inf)
    assert batch.places == (0, 2, 1)  # in the order of their tokens
    assert batch.lengths == (14, 14, 13)
    # The prompt and its first answer; of the second nothing is new; the third begins after the prompt.
    assert batch.input_ids_br.tolist() == [[*BEGIN, 1, 2, 4]]
    assert batch.segments.lengths == (14, 1)
    assert batch.segments.starts == (0, 12)
    assert batch.segments.positions_br.tolist() == [[*range(14), 12]]
    shared, bounds = batch.segments.shared_keys or (None, None)
    assert shared.tolist() == [*range(14), *range(12), 14]
    assert bounds.tolist() == [0, 14, 27]
    # Every sequence has its own targets: the prompt's last place predicts three tokens.
    assert batch.target_ids_bt[0, batch.trained_n].tolist() == [1, 2, 3, 1, 2, 3, 4, 5]
    assert batch.row_n.tolist() == [11, 12, 13, 11, 12, 13, 11, 14]
    assert (batch.num_tokens_global, batch.num_sequences_global) == (8, 3)


def test_beginnings_too_short_are_not_shared() -> None:
    samples = group((1, 2), (3, 4), prompt=BEGIN[:7]) + group((1, 2), (3, 4), prompt=BEGIN[:8])
    [[batch]] = pack(samples, share=math.inf)
    assert batch.segments.starts == (0, 0, 0, 8)
    # Nor are they for a small part of the sequence, whose keys would all be copied.
    long = tuple(range(100, 400))
    [[batch]] = pack(group((1, *long), (2, *long[:100]), (3, *long)), share=math.inf)
    assert batch.segments.starts == (0, 12, 0)


@pytest.mark.parametrize(
    ("common", "length", "pairs", "is_worth"),
    [
        (64, 512, 1536.0, True),  # 448 x 448 pairs beside 64 x 64, and 64 positions of 2 x 1536 halves of a pair
        (63, 512, 1536.0, False),
        (256, 2048, 1536.0, False),
        (256, 2048, math.inf, True),
        (2048, 4096, 1536.0, True),
    ],
)
def test_without_a_kernel_the_pairs_of_what_follows_may_cost_what_is_shared(
    common: int, length: int, pairs: float, is_worth: bool
) -> None:
    assert prefixes.is_worth_sharing(common, length, pairs) == is_worth


def trees(count: int, rng: random.Random) -> list[TrainSample]:
    """Returns sequences that branch off one another anywhere, whose tokens are trained anywhere behind the second."""
    made: list[list[int]] = []
    for _ in range(count):
        begin = rng.choice(made)[: rng.randint(0, 40)] if made and rng.random() < 0.8 else []
        made.append(begin + [rng.randrange(62) for _ in range(rng.randint(3, 30))])
    masks = [[index >= 2 and rng.random() < 0.7 for index in range(len(one) - 1)] + [True] for one in made]
    return [sample_of(sequence(one, mask), rng.gauss(0, 1)) for one, mask in zip(made, masks, strict=True)]


def saved(kind: type[PreTrainedModel], config: Any, folder: Path) -> ModelConfig:
    torch.manual_seed(0)
    model: Any = kind(config)
    model.save_pretrained(folder)
    return ModelConfig(path=str(folder))


many = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "sliding_window": 5}
ARCHITECTURES = {
    "grouped heads": (Qwen2ForCausalLM, Qwen2Config(**SIZES | {"initializer_range": 0.3})),
    "sliding window": (MistralForCausalLM, MistralConfig(**SIZES | {"initializer_range": 0.3}, sliding_window=9)),
    "sinks": (GptOssForCausalLM, GptOssConfig(**SIZES | {"initializer_range": 0.3}, **many)),
}


def passed(module: Any, samples: list[TrainSample], **how: Any) -> tuple[dict[int, list[Tensor]], Tensor, int]:
    """Returns each sample's numbers, the gradient of their weighted sum, and how many positions were computed."""
    module.zero_grad()
    numbers: dict[int, list[Tensor]] = {}
    rows = [batch for rank in pack(samples, **how) for batch in rank]
    for batch in rows:
        found = module(batch)
        columns = found if isinstance(found, tuple) else (found,)
        (columns[0] * batch.advantages_bt).sum().backward()
        parts = [torch.split(column.detach()[0], list(batch.lengths)) for column in columns]
        numbers |= {place: [part[i] for part in parts] for i, place in enumerate(batch.places)}
    gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    return numbers, gradient, sum(batch.input_ids_br.numel() for batch in rows)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", mostly_long([Policy, ValueModel], Policy))
def test_numbers_and_gradients_are_those_of_packing(
    architecture: str, kind: type[Policy], tmp_path: Path, rng: random.Random
) -> None:
    model = saved(*ARCHITECTURES[architecture], tmp_path)
    module = kind(model, dtype=torch.float32, temperature=0.8, entropy_gradient=True)
    if isinstance(module, ValueModel):
        nn.init.normal_(module.model.get_output_embeddings().weight)
    for count in (2, 13, 40):
        samples = trees(count, rng)
        expected, plain, most = passed(module, samples)
        for how in ({}, {"micro_batch_tokens": 80}, {"micro_batch_tokens": 120, "num_ranks": 3, "key_share": 0.1}):
            found, gradient, fewer = passed(module, samples, share=math.inf, **how)
            assert found.keys() == expected.keys()
            for place, columns in expected.items():
                assert_near(torch.stack(found[place]), torch.stack(columns), training.additions(model.path))
            assert_near(gradient, plain, training.gradient_additions(model.path))
            assert how or count < 40 or fewer < most  # few may begin with nothing in common


KL = ("algorithm.kl=k3", "algorithm.kl_in=loss", "algorithm.kl_coef=0.1")
STEPS = {
    **{preset: (f"algorithm.preset={preset}",) for preset in PRESETS},
    "several updates, a reference": ("algorithm.epochs=2", "algorithm.minibatches=2", *KL),
    "entropy": ("algorithm.entropy_coef=0.1", "trainer.gradient_checkpointing=long"),
    "lora": ("model.lora.rank=4", *KL),
    "ZeRO-2": ("trainer.zero_stage=2",),
    "ZeRO-3": ("trainer.zero_stage=3", "trainer.gradient_checkpointing=true"),
}


@pytest.mark.parametrize("case", mostly_long(STEPS, "dapo"))
def test_three_steps_are_those_of_packing(case: str, ranks: Ranks, tied_model: str) -> None:
    groups = training.make_groups(tied_model, prompt=9)
    found: list[Any] = []
    for share in ("false", "true"):
        with training.make_trainer(ranks, tied_model, f"trainer.share_prefixes={share}", *STEPS[case]) as trainer:
            steps = [trainer.step(training.measured(trainer, groups, returns=1.0), number=step) for step in range(3)]
            found.append((steps, training.state_of(trainer)))
    (packed, state), (shared, theirs) = found
    for step, other in zip(packed, shared, strict=True):
        assert step.pop("train/shared") == 0 < other.pop("train/shared")
        assert_same_metrics(untimed(other), untimed(step), tied_model)
    assert_same_states(theirs, state, tied_model, sum(step["train/updates"] for step in packed))


def test_what_is_computed_is_every_distinct_beginning_once(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    monkeypatch.setattr(prefixes, "is_worth_sharing", lambda common, length, pairs: common > 0)
    samples = trees(30, rng)
    [[batch]] = pack(samples, share=math.inf)
    beginnings = {tuple(s.sequence.token_ids[:n]) for s in samples for n in range(1, len(s.sequence.token_ids))}
    assert batch.input_ids_br.numel() == len(beginnings)
    # In the row, a sequence's places hold its tokens, and it sees them all, in order.
    row = batch.input_ids_br[0]
    shared, bounds = batch.segments.shared_keys or (None, None)
    seen = {tuple(row[part].tolist()) for part in torch.tensor_split(shared, bounds[1:-1].tolist())}
    longest = {tuple(s.sequence.token_ids[:-1]) for s in samples}
    assert seen <= longest
    assert {
        one for one in longest if not any(len(two) > len(one) and two[: len(one)] == one for two in longest)
    } <= seen


@pytest.mark.parametrize(
    ("count", "row_tokens", "rows"),
    [
        (20, 30, [112, 112]),  # of 36 + 19 · 4 positions: 8 of 140 are little, 32 are not
        (20, 1000, [216]),
        (9, 30, [128]),  # 8 of 68 + 28 are too many to compute again
    ],
)
def test_rows_end_where_little_is_shared(count: int, row_tokens: int, rows: list[int]) -> None:
    endings = [(number, *range(4)) for number in range(count)]
    prompts = [(*range(8), *(own,) * 24) for own in (50, 51)]
    samples = [one for prompt in prompts for one in group(*endings, prompt=prompt)]
    [batches] = pack(samples, share=math.inf, row_tokens=row_tokens)
    assert [batch.input_ids_br.numel() for batch in batches] == rows


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("limit", [60, 100, 1000])
def test_no_row_and_its_copies_of_keys_exceed_the_micro_batch(num_ranks: int, limit: int) -> None:
    prompts = [tuple(range(first, first + 12)) for first in range(8)]
    samples = [one for prompt in prompts for one in group(*((i, *range(6)) for i in range(8)), prompt=prompt)]
    rows = [b for rank in pack(samples, share=math.inf, num_ranks=num_ranks, micro_batch_tokens=limit) for b in rank]
    assert sorted(place for batch in rows for place in batch.places) == list(range(64))
    assert max(batch.input_ids_br.numel() for batch in rows) <= limit
    # 64 sequences of 18 positions, 8 of which share 12: about as many as fit, each row with its own prompts.
    least = -(-64 * 6 // limit)
    assert len(rows) <= 2 * least + num_ranks
    sizes = [sum(b.input_ids_br.numel() for b in rank) for rank in pack(samples, share=math.inf, num_ranks=num_ranks)]
    assert max(sizes) <= 60 * -(-8 // num_ranks)  # whole groups


def test_the_kernel_for_gpus_is_asked_for_each_segment_s_own_keys(
    monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    [[batch]] = pack(trees(20, rng), share=math.inf)
    segments = batch.segments
    size = batch.input_ids_br.numel()
    query, key, value = (torch.randn(1, heads, size, 8, requires_grad=True) for heads in (4, 2, 2))
    expected, _ = attend(nn.Module(), query, key, value, None, scaling=0.3, segments=segments, sliding_window=7)

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, seen: Tensor, *longest: int, **how: Any
    ) -> Any:
        """What FlashAttention documents: the last query sees the last key, and a window ends at the same place."""
        assert longest == (max(segments.lengths), max(segments.ends))
        left, right = how["window_size"]
        assert (left, right) == (6, 0)
        found = []
        for first, last, begin, end in zip(starts, starts[1:], seen, seen[1:], strict=False):
            q, k, v = (
                t[a:b].transpose(0, 1) for t, a, b in ((query, first, last), (key, begin, end), (value, begin, end))
            )
            n, m = q.shape[1], k.shape[1]
            back = torch.arange(n)[:, None] + m - n - torch.arange(m)
            scores = 0.3 * q @ k.repeat_interleave(2, 0).transpose(1, 2)
            weights = scores.masked_fill((back < 0) | (back > left), -torch.inf).softmax(-1)
            found.append((weights @ v.repeat_interleave(2, 0)).transpose(0, 1))
        return torch.cat(found)

    monkeypatch.setattr(attention, "has_kernel", lambda query, key, value: True)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    result, _ = attend(nn.Module(), query, key, value, None, scaling=0.3, segments=segments, sliding_window=7)
    assert_near(result, expected, 8 + 2 * max(segments.ends))  # scores; softmax and sum of what is seen
    assert "groups" in vars(segments)


@pytest.mark.parametrize("wrong", ["a child sees its sibling", "the last shared token is missing"])
def test_a_wrong_layout_is_noticed(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = batching.row_places

    def broken(lengths: list[int], starts: list[int]) -> list[np.ndarray]:
        rows = original(lengths, starts)
        for before, row, start in zip(rows, rows[1:], starts[1:], strict=False):
            if start:
                row[start - 1] = before[start] if wrong == "a child sees its sibling" else before[start - 2]
        return rows

    model = saved(*ARCHITECTURES["grouped heads"], tmp_path)
    module = Policy(model, dtype=torch.float32, temperature=1.0)
    samples = group((1, 2, 3), (4, 5, 6), (7, 8, 9))
    expected, _, _ = passed(module, samples)
    monkeypatch.setattr(batching, "row_places", broken)
    found, _, _ = passed(module, samples, share=math.inf)
    assert max(float((found[place][0] - expected[place][0]).abs().max()) for place in expected) > 1e-3


def test_a_run_is_divided_where_it_is_too_long_or_saves_too_little() -> None:
    sizes = Sizes(first=[30.0, 30.0, 30.0, 30.0], added=[30.0, 10.0, 30.0, 29.0])
    runs = functools.partial(SharingPacker().runs, sizes)
    assert sizes.of([0, 1]) == 40
    assert runs(range(4), 1000) == [[0, 1], [2, 3]]  # the third has nothing in common with the one before
    assert runs(range(4), 59) == [[0, 1], [2, 3]]
    assert runs(range(4), 58) == [[0, 1], [2], [3]]
    assert runs(range(4), 39) == [[0], [1], [2], [3]]
    # Beyond 35, the fourth saves 1 of 59, which is little: 16 times as much is less. The second saves 20 of 40.
    assert runs(range(4), 1000, 35) == [[0, 1], [2], [3]]
    assert runs(range(4), 1000, 59) == [[0, 1], [2, 3]]
