"""What is known of a rollout's tokens before the step: taken out of packed batches, sequence by sequence.

Takes numbers on the next-token axis of batches, gives one number per token of each sequence. Never knows which model
computed them.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hocket.trainer.batching import TrainBatch
from hocket.types import TokenSequence, TrainSample


def samples_of(sequences: Sequence[TokenSequence]) -> tuple[TrainSample, ...]:
    """Returns the sequences as they are packed: with nothing to learn from yet."""
    return tuple(TrainSample(sequence=one, advantages=(0.0,) * len(one.token_ids)) for one in sequences)


def unpack(
    batches: Sequence[TrainBatch], columns: Mapping[str, Sequence[Tensor]]
) -> dict[int, dict[str, tuple[float, ...]]]:
    """Returns the numbers of each sequence that is in these batches, by its place among the packed ones.

    The first token of a sequence is predicted by nothing: its number is 0.

    Args:
        columns: name → one tensor [b, t] per batch, 0 where the mask is false.
    """
    found: dict[int, dict[str, tuple[float, ...]]] = {}
    for index, batch in enumerate(batches):
        sample_bt = batch.sample_bt.cpu()
        values = {name: tensors[index].cpu() for name, tensors in columns.items()}
        for sample in set(sample_bt.flatten().tolist()) - {-1}:
            own_bt = sample_bt == sample  # consecutive positions of one row
            found[sample] = {name: (0.0, *values_bt[own_bt].tolist()) for name, values_bt in values.items()}
    return found
