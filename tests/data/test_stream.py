import json
from collections.abc import Sequence

import pytest

from hocket.data import Draw, PromptStream
from hocket.errors import DataError
from hocket.types import Prompt


def prompts(num: int, answer: str = "x") -> list[Prompt]:
    return [Prompt(id=f"rows:{i}", token_ids=(i + 1,), answer=answer) for i in range(num)]


def ids(taken: Sequence[Draw | Prompt]) -> list[str]:
    return [(item.prompt if isinstance(item, Draw) else item).id for item in taken]


def test_every_epoch_has_each_prompt_once_in_an_order_of_its_own() -> None:
    stream = PromptStream(prompts(10), seed=0)
    taken = ids([prompt for _ in range(10) for prompt in stream.take(3)])  # takes cross the epochs
    epochs = [taken[:10], taken[10:20], taken[20:]]
    for epoch in epochs:
        assert sorted(epoch) == sorted(ids(prompts(10)))
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_the_seed_and_nothing_else() -> None:
    assert ids(PromptStream(prompts(50), seed=1).take(120)) == ids(PromptStream(prompts(50), seed=1).take(120))
    assert ids(PromptStream(prompts(50), seed=1).take(50)) != ids(PromptStream(prompts(50), seed=2).take(50))


def test_one_take_may_be_longer_than_an_epoch() -> None:
    taken = ids(PromptStream(prompts(3), seed=0).take(7))
    assert (len(taken), sorted(taken[:3]), sorted(taken[3:6])) == (7, ids(prompts(3)), ids(prompts(3)))


@pytest.mark.parametrize("before", [0, 1, 9, 10, 11, 25])
def test_a_restored_stream_goes_on_where_the_other_was(before: int) -> None:
    stream = PromptStream(prompts(10), seed=3)
    stream.take(before)
    state = json.loads(json.dumps(stream.state()))
    restored = PromptStream(prompts(10), seed=3)
    restored.take(4)
    restored.restore(state)
    assert ids(restored.take(30)) == ids(stream.take(30))


def test_a_position_among_other_prompts_is_refused() -> None:
    state = PromptStream(prompts(10), seed=0).state()
    with pytest.raises(DataError, match="seed of the prompts was 0 and is 1 now"):
        PromptStream(prompts(10), seed=1).restore(state)
    with pytest.raises(DataError, match="num_prompts of the prompts was 10 and is 9 now"):
        PromptStream(prompts(9), seed=0).restore(state)
    with pytest.raises(DataError, match="fingerprint of the prompts"):
        PromptStream(prompts(10, answer="y"), seed=0).restore(state)


def test_a_stream_without_prompts_says_what_to_check() -> None:
    with pytest.raises(DataError, match=r"data\.max_prompt_tokens"):
        PromptStream([], seed=0)
