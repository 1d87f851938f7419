from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hocket.trainer.attention import Reach
from hocket.trainer.grouped_attention import SegmentGroup, SegmentGroups, attend_in_groups, divide


def test_without_the_kernel_a_gpu_gets_no_grouped_heads_which_would_take_memory_for_all_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, **options: Any) -> Tensor:
        assert (key.shape, value.shape, enable_gqa) == ((1, 4, 32, 8), (1, 4, 32, 8), False)
        return query

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", kernel)
    with FakeTensorMode():
        query, key, value = (torch.empty(32, heads, 8, device="cuda") for heads in (4, 2, 2))
        group, restore = (torch.empty(*n, dtype=torch.int64, device="cuda") for n in ((1, 32), (32,)))
        groups = SegmentGroups([SegmentGroup(group, group, None)], restore)
        assert attend_in_groups(query, key, value, groups, 0.3, Reach(), None).shape == (32, 4, 8)


def test_segments_are_grouped_by_both_lengths_and_padded_with_their_last_position() -> None:
    """Of 3, 40, 2 and 1 positions; the last follows on 2 positions that it shares with the first."""
    lengths, ends = (3, 40, 2, 1), (3, 40, 2, 3)
    key_places = torch.tensor([*range(3), *range(3, 43), 43, 44, 0, 1, 45])
    (short, long), restore = divide(lengths, ends, key_places)
    assert short.queries.tolist() == [[0, 1, 2], [43, 44, 44], [45, 45, 45]]
    assert short.keys.tolist() == [[0, 1, 2], [43, 44, 44], [0, 1, 45]]
    assert short.positions is not None
    assert short.positions.tolist() == [[0, 1, 2], [0, 1, 1], [2, 2, 2]]
    assert short.mask(Reach(window=2)).tolist()[2] == [[[False, True, True]] * 3]
    assert long.queries.tolist() == long.keys.tolist() == [list(range(3, 43))]
    assert long.positions is None
    # The results of the short ones are the first nine, those of the long one follow.
    assert restore.tolist() == [0, 1, 2, *range(9, 49), 3, 4, 6]
