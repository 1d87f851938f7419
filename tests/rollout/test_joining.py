"""Calls are joined into sequences: those of a thousand agents that go on, rewrite, branch and break off."""

import random

import fakes
from hocket.protocol import AgentCall
from hocket.rollout.agents import join


def call(asked: list[int], *sampled: int) -> AgentCall:
    logprobs = tuple(-i / 1000 for i in sampled)
    done = fakes.completion(*sampled, logprobs=logprobs, text=f"<{sampled[0]}>")
    return AgentCall(prompt_token_ids=tuple(asked), completion=done)


def test_a_thousand_agents_lose_no_sampled_token_and_train_none_twice() -> None:
    seen = set()
    for seed in range(1000):
        rng = random.Random(seed)
        fresh = iter(range(1000, 100_000))  # every sampled token is another one
        told = lambda: [rng.randrange(4) for _ in range(rng.randint(0, 3))]  # noqa: B023, E731
        histories = [[rng.randrange(4)]]
        calls: list[AgentCall] = []
        ends: list[list[int]] = []  # of sequences, with the tokens of the agent's own
        for _ in range(rng.randint(1, 8)):
            asked = list(rng.choice(histories)) + told()
            if rng.random() < 0.2:
                del asked[rng.randrange(len(asked))]  # the agent rewrites what was said
                asked = asked or [0]
            if rng.random() < 0.1:
                calls.append(AgentCall(prompt_token_ids=tuple(asked), completion=None))
                continue
            sampled = [next(fresh) for _ in range(rng.randint(1, 4))]
            calls.append(call(asked, *sampled))
            histories.append(asked + sampled)
            before = [end for end in ends if asked[: len(end)] == end]
            if before:
                ends.remove(max(before, key=len))
            ends.append(asked + sampled)
        sequences = join(calls, str)
        assert [one.token_ids for one in sequences] == ends
        trained = [i for one in sequences for i, own in zip(one.token_ids, one.mask, strict=True) if own]
        completions = [done.completion for done in calls if done.completion is not None]
        assert sorted(trained) == sorted(i for done in completions for i in done.token_ids)
        for one in sequences:
            assert len(one.token_ids) == len(one.mask) == len(one.logprobs)
            expected = [-i / 1000 if own else 0.0 for i, own in zip(one.token_ids, one.mask, strict=True)]
            assert one.logprobs == expected
            assert not one.mask[0]
            assert one.mask[-1]
        assert sum(one.turns for one in sequences) == len(completions)
        for done in calls:  # the model saw, before what it sampled, just what stands before it in a sequence
            if done.completion is not None:
                first = done.completion.token_ids[0]
                (mine,) = [one for one in sequences if (first, True) in zip(one.token_ids, one.mask, strict=True)]
                assert mine.token_ids[: mine.token_ids.index(first)] == list(done.prompt_token_ids)
        seen.add(len(sequences))
    assert seen >= {0, 1, 2, 3, 4}
