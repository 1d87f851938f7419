"""Make samples, sums and metrics of pairs: a chosen and a rejected completion of one prompt."""

import torch
from torch import Tensor

from hocket.trainer.batching import TrainBatch
from hocket.types import TokenSequence, TrainSample


def sample(sequence: TokenSequence, **numbers: float) -> TrainSample:
    """Make a sample of a sequence, with a column for each number: 0 but at the last token."""
    zeros = (0.0,) * len(sequence.mask)
    columns = {}
    for name, number in numbers.items():
        values = list(zeros)
        values[-1] = number
        columns[name] = tuple(values)
    return TrainSample(sequence=sequence, advantages=zeros, columns=columns)


def sums(values_bt: Tensor, batch: TrainBatch) -> Tensor:
    """Sum over each sequence numbers that are 0 where no token is trained: [pairs, 2].

    The columns are chosen and rejected.
    """
    values_t = values_bt[0].double()
    sums_n = torch.zeros_like(values_t).index_add(0, batch.sample_bt[0], values_t)
    num = len(batch.places)  # 0 in a rank's last micro-batch; a rehearsal's may be odd
    return sums_n[: num + num % 2].view(-1, 2)


def mean(values_p: Tensor, batch: TrainBatch) -> Tensor:
    """Compute this micro-batch's share of the mean over all pairs of the step."""
    return values_p.sum() / (batch.num_sequences_global / 2)


def metrics(rewards_p2: Tensor, batch: TrainBatch) -> dict[str, Tensor]:
    """Compute this micro-batch's shares of the means that TRL logs under these names."""
    chosen_p, rejected_p = rewards_p2.detach().unbind(dim=1)
    means = {
        "chosen": chosen_p,
        "rejected": rejected_p,
        "margins": chosen_p - rejected_p,
        "accuracies": (chosen_p > rejected_p).double(),
    }
    return {f"rewards/{name}": mean(values_p, batch) for name, values_p in means.items()}
