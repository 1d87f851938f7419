"""Score letters that are to be sorted from Z to A; parts of a right answer count, or there would be nothing to learn."""

from hocket.rewards import reward


@reward("falling")
def falling(completion: str, answer: str, bonus: float = 0.0) -> dict[str, float]:
    """Return the share of neighbours in falling order, 0 with other letters than asked for; a bonus if all is right."""
    if sorted(completion) != sorted(answer):
        return {"neighbours": 0.0}
    pairs = list(zip(completion, completion[1:], strict=False))
    share = sum(first > second for first, second in pairs) / len(pairs)
    return {"neighbours": share, "bonus": bonus * (completion == answer)}
