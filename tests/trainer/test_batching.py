import dataclasses
import random
from typing import Any

import pytest

from hocket.trainer.attention import RowPart
from hocket.trainer.batching import (
    TrainBatch,
    divide,
    row_places,
    unpack,
)
from hocket.types import TrainSample
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


def test_a_sequence_s_places_are_those_that_it_shares_then_its_own() -> None:
    assert [row.tolist() for row in row_places([3, 4, 2], [0, 2, 0])] == [[0, 1, 2], [0, 1, 3, 4], [5, 6]]


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
