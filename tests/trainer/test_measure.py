"""Numbers of packed batches find their way back to the tokens they belong to."""

import torch

from hocket.trainer import measure
from hocket.trainer.batching import TrainBatch, pack
from hocket.types import Measured, TokenSequence


def make_rollout(token_ids: tuple[int, ...], mask: tuple[bool, ...]) -> TokenSequence:
    return TokenSequence(token_ids=token_ids, mask=mask, logprobs=tuple(-1.0 if m else 0.0 for m in mask))


def columns_of(batches: list[TrainBatch]) -> dict[str, list[torch.Tensor]]:
    """Ten times the predicted token, and its negative, where the mask is true."""
    return {
        "values": [(10.0 * batch.target_ids_bt).where(batch.mask_bt, 0.0) for batch in batches],
        "entropies": [(-1.0 * batch.target_ids_bt).where(batch.mask_bt, 0.0) for batch in batches],
    }


def test_each_sequence_gets_its_own_numbers_from_whichever_rank_and_row_it_was_packed_into() -> None:
    rollouts = [
        make_rollout((1, 2, 3), (False, True, True)),
        make_rollout((4, 5, 6, 7, 8), (False, False, True, False, True)),
        make_rollout((1, 2, 3), (False, True, True)),  # the first one again
        make_rollout((9, 10), (False, True)),
    ]
    expected = [
        Measured(values=(0.0, 20.0, 30.0), entropies=(0.0, -2.0, -3.0)),
        Measured(values=(0.0, 0.0, 60.0, 0.0, 80.0), entropies=(0.0, 0.0, -6.0, 0.0, -8.0)),
        Measured(values=(0.0, 20.0, 30.0), entropies=(0.0, -2.0, -3.0)),
        Measured(values=(0.0, 100.0), entropies=(0.0, -10.0)),
    ]
    samples = measure.samples_of(rollouts)
    for num_ranks in (1, 2, 3):
        for micro_batch_tokens in (4, 6, 100):
            ranks = pack(samples, micro_batch_tokens=micro_batch_tokens, num_ranks=num_ranks)
            shares = [measure.unpack(batches, columns_of(batches)) for batches in ranks]
            assert sum(map(len, shares)) == 4
            found = {index: Measured(**numbers) for share in shares for index, numbers in share.items()}
            assert [found[index] for index in range(4)] == expected


def test_a_sequence_without_trained_tokens_is_all_zero() -> None:
    rollouts = [make_rollout((1, 2), (False, True)), make_rollout((3, 4, 5), (True, False, False))]
    batches = pack(measure.samples_of(rollouts), micro_batch_tokens=100, num_ranks=1)[0]
    ones = {"ref_logprobs": [batch.mask_bt.float() for batch in batches]}
    assert measure.unpack(batches, ones) == {
        0: {"ref_logprobs": (0.0, 1.0)},
        1: {"ref_logprobs": (0.0, 0.0, 0.0)},
    }
