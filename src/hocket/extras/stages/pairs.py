"""Pairs of completions behind one prompt, a chosen and a rejected one: their samples, sums and
metrics."""

import torch
from torch import Tensor

from hocket.trainer.batching import TrainBatch
from hocket.types import TokenSequence, TrainSample


def sample(sequence: TokenSequence, **numbers: float) -> TrainSample:
    """Return a sequence with numbers of its own, each a column that has it at the end."""
    zeros = (0.0,) * len(sequence.mask)
    columns = {name: (*zeros[1:], number) for name, number in numbers.items()}
    return TrainSample(sequence=sequence, advantages=zeros, columns=columns)


def sums(values_bt: Tensor, batch: TrainBatch) -> Tensor:
    """Return the sums over sequences of numbers that are 0 where no token is trained: [pairs,
    (chosen, rejected)]."""
    values_t = values_bt[0].double()
    sums_n = torch.zeros_like(values_t).index_add(0, batch.sample_bt[0], values_t)
    num = len(batch.places)  # 0 in a rank's last micro-batch; a rehearsal's may be odd
    return sums_n[: num + num % 2].view(-1, 2)


def mean(values_p: Tensor, batch: TrainBatch) -> Tensor:
    """Return this micro-batch's share of the mean over all pairs."""
    return values_p.sum() / (batch.num_sequences_global / 2)


def metrics(rewards_p2: Tensor, batch: TrainBatch) -> dict[str, Tensor]:
    """Return shares of means over pairs, by TRL's names."""
    chosen_p, rejected_p = rewards_p2.detach().unbind(dim=1)
    means = {
        "chosen": chosen_p,
        "rejected": rejected_p,
        "margins": chosen_p - rejected_p,
        "accuracies": (chosen_p > rejected_p).double(),
    }
    return {f"rewards/{name}": mean(values_p, batch) for name, values_p in means.items()}
