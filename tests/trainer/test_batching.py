import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest

from hocket.config import load
from hocket.errors import ConfigError, TrainerError
from hocket.trainer import batching
from hocket.trainer.attention import RowPart
from hocket.trainer.batching import (
    PACKERS,
    Packer,
    TrainBatch,
    balance,
    check_fits,
    chosen_packer,
    divide,
    row_places,
    unpack,
)
from hocket.trainer.choices import check
from hocket.trainer.prefixes import SharingPacker
from hocket.types import TrainSample
from support.examples import plugged, shown
from support.training import CPU, pack, sample_of, sequence


def sample(*token_ids: int, prompt: int = 1, advantage: float = 1.0, **more: Any) -> TrainSample:
    """Returns a sample whose log-probs are its tokens' ids, negative."""
    rollout = sequence(token_ids, prompt)
    logprobs = tuple(-float(i) if m else 0.0 for i, m in zip(token_ids, rollout.mask, strict=True))
    return sample_of(dataclasses.replace(rollout, logprobs=logprobs), advantage, **more)


def test_a_hand_worked_batch() -> None:
    long = sample(5, 6, 7, 8, prompt=2, advantage=2.0, is_unbiased=True, columns={"values": (0.0, 0.1, 0.2, 0.3)})
    short, tiny = (
        sample(*ids, advantage=advantage, columns={"values": (0.0, value)})
        for ids, advantage, value in (((1, 2), -1.0, 0.4), ((3, 4), 1.0, 0.5))
    )
    [[batch]] = pack([short, long, tiny], micro_batch_tokens=6)
    # the longest first, and no padding anywhere
    assert batch.segments.lengths == (3, 1, 1)
    assert batch.input_ids_br.tolist() == [[5, 6, 7, 1, 3]]
    assert batch.target_ids_bt.tolist() == [[6, 7, 8, 2, 4]]
    assert batch.segments.positions_br.tolist() == [[0, 1, 2, 0, 0]]
    assert batch.mask_bt.tolist() == [[False, True, True, True, True]]
    assert batch.rollout_logprobs_bt.tolist() == [[0.0, -7.0, -8.0, -2.0, -4.0]]
    assert batch.advantages_bt.tolist() == [[0.0, 2.0, 2.0, -1.0, 1.0]]
    assert batch.columns["values"].tolist() == [pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])]
    assert batch.unbiased_bt.tolist() == [[False, True, True, False, False]]
    assert batch.trained_n.tolist() == batch.row_n.tolist() == [1, 2, 3, 4]
    assert batch.sample_bt.tolist() == [[0, 0, 0, 1, 2]]
    assert batch.places == (1, 0, 2)
    assert (batch.num_tokens_global, batch.num_sequences_global, batch.max_tokens) == (4, 3, 4)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_tokens", [19, 40, 1000])
def test_every_sample_is_in_exactly_one_segment_and_no_batch_is_too_big(
    num_ranks: int, micro_batch_tokens: int, rng: random.Random
) -> None:
    samples = [sample(*range(rng.randint(3, 20)), prompt=2) for _ in range(37)]
    ranks = pack(samples, micro_batch_tokens=micro_batch_tokens, num_ranks=num_ranks)
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for rank in ranks for batch in rank]
    assert sorted(place for batch in batches for place in batch.places) == list(range(37))
    assert max(batch.input_ids_br.numel() for batch in batches) <= micro_batch_tokens
    num_tokens = sum(sum(one.sequence.mask) for one in samples)
    assert {(batch.num_tokens_global, batch.num_sequences_global) for batch in batches} == {(num_tokens, 37)}
    assert sum(int(batch.mask_bt.sum()) for batch in batches) == num_tokens


def test_micro_batches_are_filled_longest_first_and_the_costliest_comes_first() -> None:
    # 9, 6, 4, 3, 2 and 2 positions into tens: 9 | 6 + 4 | 3 + 2 + 2; the squares are 81, 52 and 17
    samples = [sample(*range(1, length + 2)) for length in (2, 9, 3, 6, 2, 4)]
    [batches] = pack(samples, micro_batch_tokens=10, cost=lambda length: length**2)
    assert [batch.segments.lengths for batch in batches] == [(9,), (6, 4), (3, 2, 2)]
    [batches] = pack(samples, micro_batch_tokens=10)
    assert [batch.segments.lengths for batch in batches] == [(6, 4), (9,), (3, 2, 2)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("share", [False, True])
def test_the_members_of_a_unit_are_neighbours_in_one_micro_batch(
    num_ranks: int, share: bool, rng: random.Random
) -> None:
    prompts = [[rng.randrange(9) for _ in range(8)] for _ in range(5)]
    ends = [[10 + rng.randrange(40) for _ in range(rng.randint(1, 6))] for _ in range(34)]
    samples = [sample(*prompts[(place // 2) % 5], *end, prompt=8) for place, end in enumerate(ends)]
    with pytest.raises(TrainerError, match=r"tokens of one row don't fit into trainer.micro_batch_tokens=15"):
        check_fits(samples, 15, unit=2)
    pair = [sample(*prompts[0], *end, prompt=8) for end in ([20, 21, 22, 23], [30, 31, 32, 33])]
    fits, packer = (8 + 3 + 3, SharingPacker()) if share else (11 + 11, Packer())
    check_fits(pair, fits, unit=2, packer=packer)
    with pytest.raises(TrainerError, match=rf"micro_batch_tokens={fits - 1}; set it to at least {fits}, or"):
        check_fits(pair, fits - 1, unit=2, packer=packer)
    ranks = pack(samples, micro_batch_tokens=30, num_ranks=num_ranks, share=share, unit=2)
    rows = [batch.places for rank in ranks for batch in rank]
    pairs = [row[start : start + 2] for row in rows for start in range(0, len(row), 2)]
    assert sorted(pairs) == [(first, first + 1) for first in range(0, 34, 2)]
    assert max(batch.input_ids_br.numel() for rank in ranks for batch in rank) <= 30
    computed = sum(batch.input_ids_br.numel() for rank in ranks for batch in rank if batch.places)
    positions = sum(len(one.sequence.token_ids) - 1 for one in samples)
    assert computed <= positions - share * 17 * 8  # at least the prompt of each pair


def test_rows_are_filled_to_their_size_and_a_longer_sequence_has_its_own() -> None:
    samples = [sample(*range(1, length + 2)) for length in (2, 9, 3, 6, 2, 4)]
    [batches] = pack(samples, micro_batch_tokens=10, row_tokens=6)
    assert [batch.segments.lengths for batch in batches] == [(9,), (6,), (4, 2), (3, 2)]


def test_ranks_share_the_cost_rather_than_the_tokens() -> None:
    # With n² a sequence of 30 positions costs as much as nine of 10: tokens would put five of these beside it.
    samples = [sample(*range(1, 32)), *(sample(*range(1, 12)) for _ in range(9))]
    ranks = pack(samples, micro_batch_tokens=100, num_ranks=2, cost=lambda length: length**2)
    assert sorted(batch.segments.lengths for [batch] in ranks) == [(10,) * 9, (30,)]


def test_a_rank_that_runs_out_gets_a_masked_position_with_every_column() -> None:
    ranks = pack([sample(1, 2, 3, columns={"values": (0.0, 1.0, 2.0)})], micro_batch_tokens=8, num_ranks=3)
    assert [int(batches[0].mask_bt.sum()) for batches in ranks] == [2, 0, 0]
    assert {batches[0].max_tokens for batches in ranks} == {2}
    blank = ranks[1][0]
    assert (blank.places, blank.lengths, blank.input_ids_br.tolist()) == ((), (1,), [[0]])
    assert [blank.columns["values"].tolist(), blank.advantages_bt.tolist()] == [[[0.0]]] * 2
    assert blank.rollout_logprobs_bt.tolist() == [[0.0]]


def test_ranks_that_divide_a_row_have_parts_of_one_size_and_each_trained_place_once() -> None:
    [[make]] = divide([sample(5, 6, 7, 8, prompt=2), sample(1, 2), sample(3, 4)], micro_batch_tokens=9, num_ranks=1)
    first, second = (make(CPU, RowPart(2, number)) for number in range(2))
    assert [part.input_ids_br.tolist() for part in (first, second)] == [[[5, 6, 7]], [[1, 3, 0]]]  # five, and one more
    assert [part.trained_n.tolist() for part in (first, second)] == [[1, 2], [3, 4]]
    assert [part.row_n.tolist() for part in (first, second)] == [[1, 2], [0, 1]]
    assert [part.target_ids_bt.tolist() for part in (first, second)] == [[[6, 7, 8, 2, 4]]] * 2
    assert first.mask_bt.tolist() == second.mask_bt.tolist() == [[False, True, True, True, True]]
    quarters = [make(CPU, RowPart(4, number)).input_ids_br.tolist() for number in range(4)]
    assert quarters == [[[5, 6]], [[7, 1]], [[3, 0]], [[0, 0]]]  # three more


def test_costs_are_dealt_to_the_cheapest_part_the_costliest_first() -> None:
    assert balance([2, 5, 4, 3], 2) == [[1, 0], [2, 3]]  # 5 | 4, 4 + 3, 5 + 2
    assert balance([1, 1, 3], 2) == [[2], [0, 1]]


def test_a_sequence_s_places_are_those_that_it_shares_then_its_own() -> None:
    assert [row.tolist() for row in row_places([3, 4, 2], [0, 2, 0])] == [[0, 1, 2], [0, 1, 3, 4], [5, 6]]


def test_copies_of_keys_count_as_a_part_of_the_positions_that_a_sequence_shares() -> None:
    # Twelve tokens in common: 14 positions, then 2 more and, for its copy, a tenth of 14.
    samples = [sample(*range(10, 22), *end, prompt=12) for end in ((1, 2, 3), (4, 5, 6))]
    packer = chosen_packer(True, key_share=0.1)
    check_fits(samples, 18, unit=2, packer=packer)  # 14 + 2 + 1.4
    with pytest.raises(TrainerError, match="18 tokens of one row don't fit into"):
        check_fits(samples, 17, unit=2, packer=packer)
    for tokens, rows in ((18, 1), (17, 2)):
        [batches] = pack(samples, micro_batch_tokens=tokens, share=math.inf, key_share=0.1)
        assert len(batches) == rows


def test_a_sequence_that_fits_nowhere_or_nothing_to_train_on_is_refused() -> None:
    check_fits([sample(*range(1, 10))], 8)
    with pytest.raises(TrainerError, match=r"trainer\.micro_batch_tokens=7.*at least 8"):
        check_fits([sample(*range(1, 10))], 7)
    begins_alike = [sample(*range(10), 20), sample(*range(10), 30, 40)]  # they need not stay in one row
    with pytest.raises(TrainerError, match=r"trainer\.micro_batch_tokens=10.*at least 11"):
        check_fits(begins_alike, 10, packer=chosen_packer(True, pairs=1.0))
    for samples in ([], [sample(1, 2, 3, prompt=3)]):
        with pytest.raises(TrainerError, match="nothing to train on"):
            check_fits(samples, 8)


def numbers(batch: TrainBatch) -> dict[int, dict[str, tuple[float, ...]]]:
    """Ten times the predicted token where the mask is true."""
    return unpack(batch, {"values": (10.0 * batch.target_ids_bt).where(batch.mask_bt, 0.0)})


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_tokens", [4, 6, 100])
def test_each_sequence_gets_its_own_numbers_from_whichever_rank_and_row_it_was_packed_into(
    num_ranks: int, micro_batch_tokens: int
) -> None:
    sequences = [
        sequence((1, 2, 3), (False, True, True)),
        sequence((4, 5, 6, 7, 8), (False, False, True, False, True)),
        sequence((1, 2, 3), (False, True, True)),  # the first one again
        sequence((9, 10), (False, True)),
        sequence((3, 4, 5), (True, False, False)),  # nothing of it is trained
    ]
    expected = [(0.0, 20.0, 30.0), (0.0, 0.0, 60.0, 0.0, 80.0), (0.0, 20.0, 30.0), (0.0, 100.0), (0.0, 0.0, 0.0)]
    samples = list(map(sample_of, sequences))
    ranks = pack(samples, micro_batch_tokens=micro_batch_tokens, num_ranks=num_ranks)
    assert {(one.num_tokens_global, one.num_sequences_global) for batches in ranks for one in batches} == {(7, 4)}
    shares = [numbers(batch) for batches in ranks for batch in batches]
    found = {place: row for share in shares for place, row in share.items()}
    assert sum(map(len, shares)) == 5
    assert [found[place] for place in range(5)] == [{"values": row} for row in expected]


def test_ranks_get_shorter_runs_where_longer_ones_can_not_be_dealt_evenly() -> None:
    # Of 88 positions, 8 in common: halves of all 968 would be runs of 5, 5 and 2; quarters are six of 2, three each.
    samples = [sample(*range(8), *[20 + number] * 81, prompt=8) for number in range(12)]
    ranks = pack(samples, share=math.inf, num_ranks=2)
    assert [sum(row.input_ids_br.numel() for row in rank) for rank in ranks] == [88 + 5 * 80] * 2


def test_a_packer_of_one_s_own_is_named_by_the_setting(tmp_path: Path) -> None:
    """The one that the documentation of Packer shows: 8 + 8 + 7 positions, the first two in a row once."""
    head = (
        "import math\nfrom collections.abc import Sequence\n"
        "from hocket.trainer.batching import Packer, SequenceRun, Sizes, keys, packer\n"
        "from hocket.types import TrainSample\n"
    )
    code = head + shown(batching, '@packer("twins")')
    chosen = "trainer.share_prefixes=twins"
    first, twin = [sample(*range(8), last, prompt=4) for last in (20, 22)]
    with plugged(tmp_path, code, (PACKERS, "twins")):
        twins = chosen_packer(load(None, [chosen]).trainer.share_prefixes)
        [[batch]] = pack([first, sample(*range(7), 30, prompt=4), twin], packer=twins)
        assert (batch.lengths, batch.input_ids_br.numel()) == ((8, 8, 7), 8 + 7)
        check_fits([first, twin], 8, unit=2, packer=twins)
    with pytest.raises(ConfigError, match=r"share_prefixes: there is no packer 'twins'; known: plain, sharing;"):
        check(load(None, [chosen]).trainer)
