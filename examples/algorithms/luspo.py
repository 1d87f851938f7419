"""Length-unbiased sequence policy optimization (arXiv 2602.05261): GSPO, each sequence weighted by its length.

Settings: algorithm.preset=gspo algorithm.aggregate=luspo
"""

from hocket.algorithm.choices import aggregate


@aggregate("luspo")
def luspo(mask_bt, num_sequences: int):
    """Return 1 / S of each token, so that a sequence of t tokens with one ratio counts t / S."""
    return mask_bt / num_sequences
