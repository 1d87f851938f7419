"""Episodes of several turns against a fake engine that remembers every context it was given, and what it sampled."""

import asyncio
import collections
import copy
import dataclasses
import math
import random
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hocket.client.batcher import Turn
from hocket.common.tasks import seed_of
from hocket.config import DataConfig, RewardSpec
from hocket.data.prompts import renderer_of
from hocket.data.renderer import Renderer
from hocket.envs import Action, Environment, Observation, Step
from hocket.envs.base import SingleTurn, drop_oldest
from hocket.errors import ServerError
from hocket.protocol import Completion
from hocket.rewards.base import bind
from hocket.rollout.collect import Slot
from hocket.rollout.episode import Episode, TokenBudget
from hocket.types import FinishReason, Group, Message, Prompt, Rollout
from support import fakes
from support.batches import SAMPLING, gathered, own_reward
from support.episodes import END, FakeEngine, Scripted, limits, renderer, sampled, slot, user, with_seed


class Wordy(Environment):
    """Says something random, and ends at random; what it says and how it ends, the seed decides."""

    def __init__(self, gave: dict[str, list[float]]) -> None:
        self.gave = gave  # every reward of a prompt's episode; the last one is -1 where it was cut off

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        self.mine, self.rng = self.gave[prompt.id], random.Random(seed)
        await asyncio.sleep(self.rng.random() / 200)
        begin = Observation(messages=user("Begin."), max_tokens=2)
        return self.rng.choice([None, Observation(text="Begin: "), begin])

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(self.rng.random() / 200)
        content = self.rng.choice(["", "go on", "hallo 你好 <|end|>", "x" * 40])
        tools = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
        said: list[dict[str, Any]] = [{"messages": user(content)}, {"messages": tools}]
        says = self.rng.choice([*said, {"text": "\nHint: "}, {}])
        self.mine.append(self.rng.random())
        done, max_tokens = self.rng.random() < 0.25, self.rng.choice([None, 1, 3])
        return Step(**says, done=done, reward=self.mine[-1], max_tokens=max_tokens)

    async def truncated(self) -> float:
        self.mine.append(-1.0)
        return -1.0


async def played(
    make: Callable[[], Environment],
    engine: FakeEngine | None = None,
    *,
    num_prompts: int = 1,
    group_size: int = 1,
    budget: int = 0,
    seed: int = 77,
    **bounds: Any,
) -> list[Group]:
    """Returns the groups in the order of their prompts, each of whose tokens names the prompt."""
    ask, tokens = (engine or FakeEngine()).ask, TokenBudget(lambda: budget)

    async def play(prompt: Prompt, slot: Slot) -> Rollout:
        return await Episode(prompt, with_seed(slot, seed), make, ask, renderer(), limits(**bounds), tokens).play()

    chats: list[tuple[Message, ...]] = [(*user(f"{i:03}"),) for i in range(num_prompts)]
    token_ids = renderer().encode([renderer().render(chat) for chat in chats])
    prompts = [
        Prompt(id=f"p{i}", token_ids=array("I", ids), messages=chat, answer="7")
        for i, (chat, ids) in enumerate(zip(chats, token_ids, strict=True))
    ]
    return (await gathered(prompts, play, own_reward, group_size=group_size)).groups


async def played_one(make: Callable[[], Environment], engine: FakeEngine | None = None, **bounds: Any) -> Rollout:
    """Returns the rollout of one episode; its error is also that of its score."""
    (group,) = await played(make, engine, **bounds)
    assert group.scores[0].error == group.rollouts[0].error
    return group.rollouts[0]


async def test_a_thousand_random_episodes_are_what_the_engine_saw_and_sampled_and_nothing_else(
    seed: int,
) -> None:
    engine, gave = FakeEngine(), collections.defaultdict[str, list[float]](list)
    groups = await played(
        lambda: Wordy(gave), engine, num_prompts=1000, seed=seed, max_turns=6, max_length=80, timeout_s=30.0
    )
    assert len(groups) == 1000
    assert len({turn.seed for turn, _ in engine.turns}) == len(engine.turns)  # no two turns share their random numbers
    turns_of = collections.defaultdict(list)
    for turn, completion in sorted(engine.turns, key=lambda one: len(one[0].token_ids)):
        turns_of[bytes(turn.token_ids[1:4])].append((turn.token_ids, completion))  # the digits of the prompt's number
    ends = set()
    for group in groups:
        rollout, score = group.rollouts[0], group.scores[0]
        (sequence,) = rollout.sequences
        turns, rewards = turns_of[bytes(rollout.prompt.token_ids[1:4])], gave[rollout.prompt.id]
        assert len(sequence.token_ids) == len(sequence.mask) == len(sequence.logprobs) <= 80
        assert rollout.sequences[-1].turns == len(turns) >= 1
        mask = [False] * len(sequence.token_ids)
        for context, completion in turns:
            # Every context is the sequence up to there, and what was sampled follows it just as it was sampled.
            start, end = len(context), len(context) + len(completion.token_ids)
            assert sequence.token_ids[:start] == context
            assert tuple(sequence.token_ids[start:end]) == completion.token_ids
            assert tuple(sequence.logprobs[start:end]) == completion.logprobs
            mask[start:end] = [True] * (end - start)
        assert list(sequence.mask) == mask
        assert mask[-1], "nothing is told to a model that is not asked any more"
        assert not any(logprob for logprob, own in zip(sequence.logprobs, mask, strict=True) if not own)
        versions = {completion.versions[0][0] for _, completion in turns}
        assert (sequence.version_min, sequence.version_max) == (min(versions), max(versions))
        assert score.total == pytest.approx(sum(rewards))
        cut = rewards[-1] == -1.0 or turns[-1][1].finish_reason == "length"
        assert rollout.finish_reason == ("length" if cut else "stop")
        ends.add((rewards[-1] == -1.0, rollout.sequences[-1].turns == 6, rollout.finish_reason))
    assert ends >= {(False, False, "stop"), (False, False, "length"), (True, True, "length"), (True, False, "length")}


class Unruly(Environment):
    """Fails, hangs, is cancelled or talks nonsense, as the seed decides; keeps count of what was closed."""

    def __init__(self, closed: collections.Counter[int]) -> None:
        self.closed = closed
        self.closings = 0

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        self.rng = random.Random(seed)
        return await self.trouble(0.08)

    async def step(self, action: Action) -> Step:
        await self.trouble(0.08)
        if self.rng.random() < 0.05:
            return "higher"  # type: ignore[return-value]  # no Step
        return Step(messages=user("go on"), done=self.rng.random() < 0.3, reward=1.0)

    async def trouble(self, chance: float) -> None:
        await asyncio.sleep(self.rng.random() / 100)
        if self.rng.random() < chance:
            trouble = self.rng.choice([KeyError("a bug"), None, asyncio.CancelledError(), SystemExit(2)])
            if trouble is not None:
                raise trouble
            await asyncio.sleep(3600)

    async def close(self) -> None:
        self.closings += 1
        self.closed[self.closings] += 1
        if self.rng.random() < 0.1:
            raise OSError("can't close")


async def test_three_hundred_episodes_with_failures_hangs_and_cancellations_are_all_accounted_for(
    seed: int,
) -> None:
    closed: collections.Counter[int] = collections.Counter()
    engine, bounds = FakeEngine(delay_s=0.0005), {"max_turns": 5, "timeout_s": 1.0}
    groups = await played(lambda: Unruly(closed), engine, num_prompts=75, group_size=4, seed=seed, **bounds)
    ids = [rollout.id for group in groups for rollout in group.rollouts]
    assert ids == [f"s/{i}/{j}" for i in range(75) for j in range(4)]  # each once, in its place
    scores = [score for group in groups for score in group.scores]
    errors = [score.error for score in scores if score.error is not None]
    assert 30 < len(errors) < 300  # about half have one, and each cause several: of a million seeds perhaps one hasn't
    for cause in ("KeyError", "SystemExit", "env.timeout_s=1 had", "was cancelled", "returned str", "close raised"):
        assert any(cause in error for error in errors), cause
    for rollout, score in ((r, s) for g in groups for r, s in zip(g.rollouts, g.scores, strict=True)):
        assert (score.error is None) == math.isfinite(score.total)  # an error is never a number
        assert score.error is not None or score.total == rollout.sequences[-1].turns
        assert sum(rollout.sequences[0].mask) == rollout.num_sampled
        assert rollout.sequences[-1].turns or rollout.sequences[0].version_min == 0
    assert closed == {1: 300}  # every environment, once
    assert asyncio.all_tasks() == {asyncio.current_task()}  # nothing is left behind


class Endless(Unruly):
    async def trouble(self, chance: float) -> None:
        await asyncio.sleep(0)


@pytest.mark.parametrize("single", [False, True])
async def test_what_an_engine_never_answers_fails_alone_at_the_deadline(single: bool) -> None:
    seven = array("I", renderer().encode([renderer().render(user("007"))])[0])
    closed: collections.Counter[int] = collections.Counter()

    def says(turn: Turn) -> Completion:
        if seven != turn.token_ids[: len(seven)]:
            return sampled(turn.seed, turn.sampling.max_tokens)
        turn.deadline._at = 0.0
        raise ServerError("it has not finished in time", code="timeout")

    groups = await played(SingleTurn if single else lambda: Endless(closed), FakeEngine(says), num_prompts=12)
    (late,) = [group.rollouts[0] for group in groups if "rollout.timeout_s" in str(group.scores[0].error)]
    error = "the episode was not over within 60 s (rollout.timeout_s): it has not finished in time"
    assert (late.prompt.id, late.error, late.sequences[0].turns, late.num_sampled) == ("p7", error, 0, 0)
    assert late.sequences[0].token_ids == late.prompt.token_ids
    assert closed == ({} if single else {1: 12})
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("single", [False, True])
async def test_a_dead_server_ends_all_episodes_and_closes_their_environments(single: bool) -> None:
    closed: collections.Counter[int] = collections.Counter()

    def says(turn: Turn) -> Completion:
        if len(engine.turns) >= 20:
            raise ServerError("the engine died", code="engine_dead")
        return sampled(turn.seed, turn.sampling.max_tokens)

    engine = FakeEngine(says)
    with pytest.raises(ServerError, match="the engine died"):
        await played(SingleTurn if single else lambda: Endless(closed), engine, num_prompts=30)
    assert closed == ({} if single else {1: 30})
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_same_run_twice_is_the_same_whatever_the_order(seed: int) -> None:
    runs = []
    for delay_s in (0.0, 0.01):
        engine = FakeEngine(delay_s=delay_s)
        groups = await played(lambda: Wordy(collections.defaultdict(list)), engine, num_prompts=100, seed=seed)
        runs.append([group.rollouts[0] for group in groups])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("budget", "at_once"), [(50, 3), (10, 1)])
async def test_episodes_wait_until_there_is_room_for_their_tokens(budget: int, at_once: int) -> None:
    """A prompt has 6 tokens and a turn 8; one episode that is larger than the bound is played alone."""
    begun, under_way, most = list[str](), 0, 0

    class Counting(SingleTurn):
        async def reset(self, prompt: Prompt, seed: int) -> None:
            nonlocal under_way, most
            begun.append(prompt.id)
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.001)

        async def close(self) -> None:
            nonlocal under_way
            under_way -= 1

    await played(Counting, num_prompts=20, budget=budget)
    assert begun == [f"p{i}" for i in range(20)]
    assert most == at_once


async def test_a_turn_that_was_cut_off_may_go_on_and_one_that_ended_is_not_ended_twice() -> None:
    told = Step(messages=user("hm"), max_tokens=2)
    hears = Scripted(told, dataclasses.replace(told, done=True))

    def says(turn: Turn) -> Completion:
        done = fakes.completion(20, END, logprobs=(-1.0, -2.0), text="t")
        cut = {"token_ids": (21, 22), "finish_reason": "length"}
        return done.model_copy(update=cut) if hears.actions and turn.sampling.max_tokens == 2 else done

    (sequence,) = (await played_one(lambda: hears, FakeEngine(says))).sequences
    hm = renderer().encode(["<|user|>hm<|end|><|assistant|>"])[0]
    assert list(sequence.token_ids[6:]) == [20, END, *hm, 21, 22]  # the template's own <|end|> is left out
    assert [action.finish_reason for action in hears.actions] == ["stop", "length"]
    assert sequence.finish_reason == "length"
    assert [message["content"] for message in sequence.dialogue] == ["t", "hm", "t"]


class Late(Environment):
    step_timeout_s = 0.05

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(3600)
        raise AssertionError


class Hasty(Environment):
    async def step(self, action: Action) -> Step:
        raise TimeoutError("its own")


@pytest.mark.parametrize(
    ("make", "turns", "says"),
    [
        (Hasty, 1, "step raised TimeoutError: its own"),
        (lambda: Scripted(first=Observation(messages=user("x" * 300))), 0, "leaves no room"),
        (lambda: Scripted(Step(messages=[{"role": "wizard", "content": "x"}])), 1, "roles are system, user, assistant"),
        (Late, 1, "step was not done when env.timeout_s=0.05 had passed"),  # also beyond its own deadline
    ],
)
async def test_what_an_environment_does_wrong_is_the_episodes_error(
    make: Callable[[], Environment], turns: int, says: str
) -> None:
    rollout = await played_one(make, max_turns=4, timeout_s=0.05 if make is Late else 5.0)
    assert says in str(rollout.error)
    assert rollout.sequences[0].turns == turns
    assert turns or rollout.sequences[0].token_ids == rollout.prompt.token_ids


@pytest.mark.parametrize("kind", ["text", "messages"])
@pytest.mark.parametrize("first", [True, False])
async def test_what_no_sequence_can_hold_cuts_the_episode_off_and_is_never_encoded(
    monkeypatch: pytest.MonkeyPatch, first: bool, kind: str
) -> None:
    encoded: list[int] = []
    long = "lorem ipsum " * 250_000
    says: Any = {"text": long} if kind == "text" else {"messages": [{"role": "tool", "content": long}]}

    def count(texts: list[str], **options: Any) -> Any:
        encoded.extend(map(len, texts))
        return tokenizer(texts, **options)

    tokenizer = renderer()._tokenizer
    for name in ("get_vocab", "apply_chat_template"):
        setattr(count, name, getattr(tokenizer, name))
    monkeypatch.setattr(renderer(), "_tokenizer", count)
    talks = Scripted(*[Step(**says)] * 6, first=Observation(**says) if first else None)
    rollout = await played_one(lambda: talks)
    assert max(encoded) < 1000
    assert len(rollout.sequences[0].token_ids) <= 6 + 8  # prompt and turn: nothing of the text
    if first:  # without a turn of the model there is nothing that a reward could be for
        assert "reset: the prompt with what it adds leaves no room for a turn" in str(rollout.error)
    else:
        assert (rollout.error, rollout.finish_reason, rollout.sequences[-1].turns) == (None, "length", 1)


async def test_other_episodes_go_on_while_a_text_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    others_ended = threading.Event()
    encode = renderer().encode

    def slow(texts: Sequence[str], **options: Any) -> list[list[int]]:
        if texts == ["slow"]:
            assert others_ended.wait(60)
        return encode(texts, **options)

    class Several(Environment):
        left = 9

        async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
            return Observation(text="slow") if prompt.id == "p0" else None

        async def step(self, action: Action) -> Step:
            Several.left -= 1
            if Several.left == 0:
                others_ended.set()
            return Step(done=True)

    monkeypatch.setattr(renderer(), "encode", slow)
    groups = await played(Several, num_prompts=10)
    assert [group.scores[0].error for group in groups] == [None] * 10


async def test_an_environment_without_rewards_leaves_them_to_the_reward_functions() -> None:
    (group,) = await played(SingleTurn)
    (rollout,), done = group.rollouts, sampled(seed_of(77, 0, 1), 8)
    assert (rollout.id, rollout.reward, rollout.sequences[0].turns, group.scores[0].total) == ("s/0/0", None, 1, 1.0)
    assert (rollout.text, rollout.finish_reason) == (done.text, done.finish_reason)


async def test_a_budget_is_first_come_first_served_and_forgets_who_has_given_up_waiting() -> None:
    budget = TokenBudget(lambda: 10)
    await budget.start(8)
    first, second, third = (asyncio.create_task(budget.start(5)) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    budget.change(-8)
    await asyncio.gather(second, third)
    assert budget.held == 10


async def one_episode(
    make: Callable[[], Environment],
    says: Callable[[Turn], Completion],
    rendering: Renderer | None = None,
    max_turns: int = 16,
    **fields: Any,
) -> tuple[Rollout, list[Turn]]:
    """Plays an episode whose prompt has two tokens; returns what the engine was asked, too."""
    prompt, engine = Prompt(id="p", token_ids=array("I", (7, 8)), **fields), FakeEngine(says)
    bounds = limits(max_turns=max_turns)
    rollout = await Episode(prompt, slot(), make, engine.ask, rendering or renderer(), bounds, TokenBudget()).play()
    assert rollout.error is None
    return rollout, [turn for turn, _ in engine.turns]


def nine(turn: Turn, text: str = "") -> Completion:
    return fakes.completion(9, END, logprobs=(-0.5, -0.5), text=text)


async def test_later_turns_are_rendered_with_the_options_of_their_own_prompt() -> None:
    tokenizer = copy.deepcopy(renderer()._tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mark }}"
    training = renderer_of(DataConfig(chat_template={"mark": "+"}), tokenizer)
    asks = Scripted(Step(messages=user("more")))
    _, turns = await one_episode(lambda: asks, nine, training, options={"mark": "-"})  # as a prompt of eval.data
    assert tokenizer.decode(turns[1].token_ids).endswith("more-")


@pytest.mark.parametrize(
    ("told", "said", "opening"),
    [
        (None, "42", "<think>\n"),  # the first turn: as the template begins it
        (Step(messages=user("go")), "a</think>42", "<think>\n"),  # the template's again
        (Step(text="so"), "a</think>42", ""),  # text alone, after a thought that was closed
        (Step(text="so"), "a, b", "<think>"),  # or was not
        (Step(text="so</think>"), "a, b", ""),
    ],
)
async def test_a_reward_learns_which_thought_stands_open_before_the_last_turn(
    told: Step | None, said: str, opening: str
) -> None:
    tells = Scripted(*filter(None, [told]))
    rollout, _ = await one_episode(lambda: tells, lambda turn: nine(turn, said), opening="<think>\n")
    assert bind("math", RewardSpec()).arguments([rollout])["opening"] == opening
    assert rollout.text == said


@pytest.mark.parametrize(
    ("opening", "said", "inserted"),
    [
        ("", [("<think>abc", "length"), ("42", "stop")], "\n</think>\n\n"),
        ("<think>\n", [("abc", "length"), ("42", "length")], "\n</think>\n\n"),
        ("", [("<think>ab</think>4", "length"), ("2", "stop")], ""),  # the thought fits, the answer goes on
        ("", [("<think>a</think>4", "stop")], None),
        ("<think>\n\n</think>\n\n", [("a long ", "length"), ("answer", "stop")], ""),
    ],
)
async def test_a_thought_over_its_budget_is_closed_by_tokens_that_are_not_trained(
    opening: str, said: list[tuple[str, FinishReason]], inserted: str | None
) -> None:
    left = list(said)

    def says(turn: Turn) -> Completion:
        text, finish = left.pop(0)
        (ids,) = renderer().encode([text])
        token_ids = (*ids, END) if finish == "stop" else tuple(ids)
        begun = "".join(text for text, _ in said) if turn.begun else text  # a server gives the whole text again
        done = fakes.completion(*token_ids, logprobs=(-0.5,) * len(token_ids), text=begun)
        return done.model_copy(update={"finish_reason": finish})

    thinks = SingleTurn(thinking_tokens=3)
    rollout, turns = await one_episode(lambda: thinks, says, max_turns=1, opening=opening)
    assert rollout.text == (inserted or "").join(text for text, _ in said)
    assert rollout.finish_reason == said[-1][1]
    (sequence,) = rollout.sequences
    assert (sequence.turns, sequence.dialogue) == (1, ())
    added = len(renderer().encode([inserted])[0]) if inserted else 0
    first = len(renderer().encode([said[0][0]])[0]) + (said[0][1] == "stop")
    mask = [False] * 2 + [True] * first + [False] * added
    assert list(sequence.mask) == mask + [True] * (len(sequence.mask) - len(mask))
    assert all((logprob == -0.5) == trained for logprob, trained in zip(sequence.logprobs, sequence.mask, strict=True))
    assert [turn.sampling.max_tokens for turn in turns] == [3, SAMPLING.max_tokens][: len(said)]
    assert turns[-1].token_ids == sequence.token_ids[: len(turns[-1].token_ids)]
    assert len({turn.seed for turn in turns}) == len(said)


async def test_an_environment_may_begin_the_models_first_turn() -> None:
    begins = Scripted(first=Observation(text="<think>", goes_on=True))
    rollout, _ = await one_episode(lambda: begins, lambda turn: nine(turn, "so"))
    assert rollout.text == "<think>so"


async def test_a_turn_that_goes_on_at_once_is_asked_as_such_and_its_text_is_the_servers() -> None:
    """With a text of the environment, which the model did not write, what follows is a part by itself."""
    more, says = Step(goes_on=True), Step(text="|", goes_on=True)
    asks = Scripted(more, more, says, more, Step(), Step(done=True))
    texts = iter(["a", "ab", "abc", "d", "de", "f"])
    rollout, turns = await one_episode(lambda: asks, lambda turn: nine(turn, next(texts)))
    assert [turn.begun for turn in turns] == [0, 2, 4, 0, 2, 0]
    assert [action.text for action in asks.actions] == ["a", "ab", "abc", "d", "de", "f"]
    assert [message["content"] for message in rollout.sequences[0].dialogue] == ["abc|de", "f"]


async def test_a_turn_that_a_stop_string_ended_has_it_where_it_goes_on() -> None:
    def stopped(turn: Turn) -> Completion:
        done = nine(turn, "a" if len(turn.token_ids) == 2 else "b")
        return done.model_copy(update={"after_text": "</x>"})

    rollout, _ = await one_episode(lambda: Scripted(Step(text="<y>", goes_on=True)), stopped)
    assert rollout.text == "a</x><y>b"
    thinks = Scripted(Step(text="so"))
    closes = {"text": "a", "after_text": "</think>"}
    told, _ = await one_episode(lambda: thinks, lambda turn: nine(turn).model_copy(update=closes), opening="<think>")
    assert told.sequences[0].opening == ""


def chatty(turns: int = 6, **first: Any) -> Scripted:
    """Answers at length, so many times."""
    said = [{"messages": user(str(i) * 20), "reward": float(i), "done": i == turns} for i in range(1, turns + 1)]
    return Scripted(*(Step(**one) for one in said), first=Observation(**first))


async def summary(prompt: Sequence[Message], dialogue: Sequence[Message]) -> list[Message]:
    return [{"role": "assistant", "content": f"{len(dialogue)} messages"}, dialogue[-1]]


@pytest.mark.parametrize("shorten", [drop_oldest, summary])
async def test_history_that_outgrows_the_context_goes_on_shortened_in_a_new_sequence(shorten: Any) -> None:
    """Prompt and opening have 6 tokens, a turn at most 8, an answer of the environment 23."""
    engine, chats = FakeEngine(), chatty()
    rollout = await played_one(lambda: chats, engine, max_turns=9, max_length=100, history=shorten)
    assert (rollout.error, rollout.reward, rollout.finish_reason) == (None, 1 + 2 + 3 + 4 + 5 + 6, "stop")
    assert len(rollout.sequences) >= 2
    assert [turn.number for one in rollout.sequences for turn in one.turn_rewards] == list(range(6))
    assert [turn.reward for one in rollout.sequences for turn in one.turn_rewards] == [1, 2, 3, 4, 5, 6]
    contexts = iter(engine.turns)
    begin = renderer().encode([renderer().render(user("000"))])[0]
    for sequence in rollout.sequences:
        assert list(sequence.token_ids[: len(begin)]) == begin
        for _ in range(sequence.turns):
            turn, completion = next(contexts)
            assert turn.sampling.max_tokens == 8  # never cut short by the context
            assert turn.token_ids == sequence.token_ids[: len(turn.token_ids)]
            end = len(turn.token_ids) + len(completion.token_ids)
            assert tuple(sequence.token_ids[len(turn.token_ids) : end]) == completion.token_ids
    assert next(contexts, None) is None
    second = rollout.sequences[1]
    shown = renderer().decode(second.token_ids[: second.mask.index(True)])
    num_before = rollout.sequences[0].turns
    assert shown.startswith("<|user|>000<|end|><|assistant|>")
    assert str(num_before) * 20 in shown
    assert "1" * 20 not in shown
    assert (f"{2 * num_before} messages" in shown) == (shorten is summary)


@pytest.mark.parametrize("greets", [False, True])
async def test_history_is_asked_with_each_message_once(greets: bool) -> None:
    seen = list[list[str]]()
    chats = chatty(12, messages=user("hi") if greets else [])

    async def newer(prompt: Sequence[Message], dialogue: Sequence[Message]) -> Sequence[Message]:
        seen.append([message["content"] for message in (*prompt[1:], *dialogue) if message["role"] == "user"])
        return await drop_oldest(prompt, dialogue)

    rollout = await played_one(lambda: chats, max_turns=20, max_length=160, history=newer)
    assert rollout.error is None
    assert len(seen) >= 3
    for said in seen:
        assert len({*said}) == len(said)
        assert (said[0] == "hi") == greets


async def unchanged(prompt: Sequence[Message], dialogue: Sequence[Message]) -> Sequence[Message]:
    return dialogue


async def failing(prompt: Sequence[Message], dialogue: Sequence[Message]) -> Any:
    raise KeyError("a bug")


async def nothing(prompt: Sequence[Message], dialogue: Sequence[Message]) -> Any:
    return "x"


@pytest.mark.parametrize(
    ("shorten", "said"),
    [
        (unchanged, None),  # it ends as with keep
        (failing, "environment: failing raised KeyError: 'a bug'"),
        (nothing, "environment: nothing returned str, which it may not"),
    ],
)
async def test_a_history_that_does_not_help_ends_its_episode(shorten: Any, said: str | None) -> None:
    chats = chatty()
    rollout = await played_one(lambda: chats, max_turns=9, max_length=100, history=shorten)
    assert (len(rollout.sequences), rollout.sequences[0].turns >= 3) == (1, True)
    assert str(rollout.error).startswith(said) if said else (rollout.error, rollout.finish_reason) == (None, "length")
