"""Two rewards agree by the ranks that they give."""

import math

from hocket.rewards.scores import agreement
from hocket.types import Score


def test_two_rewards_are_compared_by_their_ranks_over_all_and_within_groups() -> None:
    def scored(*pairs: tuple[float, float]) -> list[tuple[Score, Score]]:
        return [(Score(total=a), Score(total=b)) for a, b in pairs]

    # ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: 1 - 6 Σd²/(n³ - n) without ties; with them 4.5 / √(4.5 · 5)
    group = [(0.0, 1.0), (5.0, 3.0), (5.0, 2.0), (9.0, 10.0)]
    assert agreement([scored(*group)]).startswith(f"rank correlation {4.5 / math.sqrt(4.5 * 5):.3f};")
    assert agreement([scored((1.0, 9.0), (2.0, 4.0), (3.0, 1.0))]).startswith("rank correlation -1.000;")
    assert agreement([scored((1.0, 2.0), (1.0, 3.0))]).startswith("rank correlation nan;")
    failed = (Score(total=math.nan, error="late"), Score(total=1.0))
    groups = [scored(*group), scored((3.0, 0.0), (2.0, 1.0)), scored((1.0, 0.0), (1.0, 0.0)), [failed]]
    # pairs: 5 in the same order and an equal one of 6; 0 of 1; the third group has none that the second orders
    said = agreement(groups)
    assert said.endswith("; 78.6% of 7 pairs in the same order")
    assert agreement([]) == "no two rollouts of a group differ"
