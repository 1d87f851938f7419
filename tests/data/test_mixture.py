import math
from collections import Counter

import pytest

from hocket.data.curriculum import Curriculum, Shuffle, Sorted
from hocket.data.mixture import MixedStream, drop_held_out
from hocket.data.stream import PromptOutcome, PromptStream
from hocket.errors import DataError
from hocket.types import Prompt, Prompts
from support.records import prompts, saved

WEIGHTS = {"a": 0.6, "b": 0.3, "c": 0.1}


def new_stream(
    weights: dict[str, float] = WEIGHTS, size: int = 40, curriculum: type[Curriculum] = Shuffle, retire_after: int = 0
) -> MixedStream:
    streams = {
        name: PromptStream(prompts(size, source=name), curriculum(), seed=3, retire_after=retire_after)
        for name in weights
    }
    return MixedStream(streams, weights, 3)


def sources(taken: dict[int, Prompt]) -> list[str]:
    return [prompt.source for prompt in taken.values()]


def test_draws_are_within_the_binomial_error_of_the_weights_and_numbered_over_all_sources() -> None:
    taken = new_stream().take(2000)
    assert list(taken) == list(range(2000))
    counts = Counter(sources(taken))
    for name, weight in WEIGHTS.items():
        assert abs(counts[name] - 2000 * weight) < 3 * math.sqrt(2000 * weight * (1 - weight))
    twice = Counter(prompt.id for prompt in list(taken.values()) if prompt.source == "c")
    assert max(twice.values()) - min(twice.values()) <= 1  # a source has epochs of its own
    assert sources(new_stream({"a": 6, "b": 3, "c": 1}, 7).take(2000)) == sources(taken)  # the number alone decides


@pytest.mark.parametrize("curriculum", [Shuffle, Sorted])
def test_a_killed_stream_draws_the_same_again(curriculum: type[Curriculum]) -> None:
    whole, killed = (new_stream(curriculum=curriculum) for _ in range(2))
    for stream in (whole, killed):
        for number in [*stream.take(90)][::2]:
            stream.settle(number, PromptOutcome(state="trained", pass_rate=number % 3 / 2))
    state = saved(killed)
    killed.take(30)  # lost with the process
    again = new_stream(curriculum=curriculum)
    again.restore(state)
    repeated = again.take(45)
    assert list(repeated) == list(range(1, 90, 2))
    for number in repeated:
        whole.settle(number, PromptOutcome(state="trained", pass_rate=0.5))
        again.settle(number, PromptOutcome(state="trained", pass_rate=0.5))
    assert list(again.take(200).items()) == list(whole.take(200).items())
    assert again.entries() == whole.entries()
    assert saved(again) == saved(whole)


@pytest.mark.parametrize("retired", WEIGHTS)
def test_draws_of_an_exhausted_source_go_to_the_others_by_their_weights_and_all_other_draws_stay(retired: str) -> None:
    def drawn(retired: str) -> list[str]:
        stream = new_stream(size=5, retire_after=1)
        found = []
        for _ in range(300):
            ((number, prompt),) = stream.take(1).items()
            found.append(prompt.source)
            stream.settle(number, PromptOutcome(state="trained", pass_rate=float(prompt.source == retired)))
        return found

    whole, without = drawn(""), drawn(retired)
    changed = [(before, now) for before, now in zip(whole, without, strict=True) if before != now]
    assert without.count(retired) == 5
    assert {before for before, _ in changed} == {retired}
    first, second = (weight for name, weight in WEIGHTS.items() if name != retired)
    heir = next(name for name in WEIGHTS if name != retired)
    share, expected = sum(now == heir for _, now in changed) / len(changed), first / (first + second)
    assert abs(share - expected) < 3 * math.sqrt(expected * (1 - expected) / len(changed))  # of the binomial


def test_a_mixture_ends_once_every_source_is_exhausted() -> None:
    stream = new_stream({"a": 1, "b": 1}, 2, retire_after=1)
    for _ in range(4):
        for number in stream.take(1):
            stream.settle(number, PromptOutcome(state="trained", pass_rate=1.0))
    assert stream.take(3) == {}


def test_pass_rates_are_measured_where_one_source_needs_them() -> None:
    for of_b, needed in ((Shuffle(), False), (Sorted(), True)):
        streams = {"a": PromptStream(prompts(1), Shuffle(), seed=0), "b": PromptStream(prompts(1), of_b, seed=0)}
        assert MixedStream(streams, {"a": 1, "b": 1}, 0).uses_pass_rates is needed


def test_what_is_settled_is_not_repeated_when_a_stream_goes_back_to_its_own_state() -> None:
    straight, restored = new_stream(), new_stream()
    for stream in (straight, restored):
        for number in stream.take(4):
            stream.settle(number, PromptOutcome(state="trained"))
    restored.restore(saved(restored))
    assert list(restored.take(2).items()) == list(straight.take(2).items())
    assert saved(restored) == saved(straight)


def asked(*texts: str, answer: str | None = "x") -> Prompts:
    return Prompts(Prompt(id=text, token_ids=(1,), text=text, answer=answer) for text in texts)


def test_repeated_and_held_out_prompts_are_counted_but_for_white_space_and_left_out_if_wanted() -> None:
    said: list[str] = []
    rows = {"": asked("2 + 2?", "2 +  2?\n", "3?", "4?", "3?\n")}
    held_out = {*asked(" 3? ").keys(), *asked("4?", answer="another").keys()}
    assert drop_held_out(rows, held_out, False, said.append) == rows
    left = drop_held_out(rows, held_out, True, said.append)[""]
    assert [prompt.text for prompt in left[:]] == ["2 + 2?", "2 +  2?\n", "4?"]
    assert left.fingerprint != rows[""].fingerprint  # no run on the others goes on with it
    assert said == [
        "2 of 5 training prompts repeat another one",
        "2 of 5 training prompts are held-out ones, too: data.exclude_overlap=true leaves them out",
        "2 of 5 training prompts repeat another one",
        "2 of 5 training prompts are held-out ones, too: left out",
    ]
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": "3?"}]
    of_chat = Prompts([Prompt(id="c", token_ids=(1,), text="3?", answer="x", messages=tuple(chat))])
    assert len(drop_held_out(rows, of_chat.keys(), True, said.append)[""]) == 3  # whatever the system says
    with pytest.raises(DataError, match=r"leaves no prompt of data\.source: other held-out rows"):
        drop_held_out({"": asked("3?")}, held_out, True, said.append)


def test_prompts_are_compared_over_all_sources() -> None:
    said: list[str] = []
    left = drop_held_out({"a": asked("1", "2"), "b": asked("2", "3")}, asked("3").keys(), True, said.append)
    assert {name: [prompt.id for prompt in some] for name, some in left.items()} == {"a": ["1", "2"], "b": ["2"]}
    assert said[0] == "1 of 4 training prompts repeat another one"
