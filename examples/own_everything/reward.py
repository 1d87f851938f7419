"""Score letters that are to be sorted from Z to A. What is right in part counts, too, or nothing would be learned."""

from itertools import pairwise

from hocket.rewards import reward


@reward("falling")
def falling(completion: str, answer: str, bonus: float = 0.0) -> dict[str, float]:
    """Return the share of neighbours in falling order, 0 with other letters than asked for; a bonus if all is right."""
    if sorted(completion) != sorted(answer):
        return {"neighbours": 0.0}
    falls = [first > second for first, second in pairwise(completion)]
    return {"neighbours": sum(falls) / len(falls), "bonus": bonus * (completion == answer)}
