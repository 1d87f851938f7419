"""Test the reward on answers whose score is known: `python test_reward.py`, or pytest."""

from reward import falling


def test_a_right_answer_gets_all_neighbours_and_the_bonus() -> None:
    assert falling("dcba", "dcba", bonus=1.0) == {"neighbours": 1.0, "bonus": 1.0}


def test_two_of_three_neighbours_in_order_are_two_thirds_without_a_bonus() -> None:
    assert falling("dcab", "dcba", bonus=1.0) == {"neighbours": 2 / 3, "bonus": 0.0}


def test_letters_that_were_not_asked_for_get_nothing() -> None:
    assert falling("zcba", "dcba", bonus=1.0) == {"neighbours": 0.0}


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"passed  {name}")
