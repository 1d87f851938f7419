"""What rewards and environments see of a turn that is sampled in several parts, by the real server's code."""

import itertools
import json
import random
from array import array
from typing import Any

import pytest

from hocket.client.batcher import Turn
from hocket.config import DataConfig
from hocket.data.prompts import renderer_of
from hocket.envs import Action, Environment, Observation, Step
from hocket.protocol import Completion
from hocket.rollout.episode import Episode, TokenBudget
from hocket.types import Prompt, Rollout
from support.engines import SpeakingEngine, make_sampler
from support.episodes import limits, slot
from support.tokenizers import SPECIAL, pieces_of, random_ids, random_text, with_byte_fallback, with_merged_bytes

KINDS = {"merged bytes": with_merged_bytes(), "byte fallback": with_byte_fallback()}
TOOLS = {"parser": "hermes", "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
CALL = '<tool_call>{"name": "f", "arguments": {"x": "🤖"}}</tool_call>'
REST = 9999  # tokens, more than there are


class Parts(Environment):
    """Has a turn sampled in parts of so many tokens."""

    def __init__(self, sizes: list[int], stop: tuple[str, ...]) -> None:
        self.sizes, self.stop = [*sizes, REST], stop
        self.actions: list[Action] = []

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        return Observation(max_tokens=self.sizes.pop(0), stop=self.stop)

    async def step(self, action: Action) -> Step:
        self.actions.append(action)
        if action.finish_reason == "stop" or not self.sizes:
            return Step(done=True)
        return Step(goes_on=True, max_tokens=self.sizes.pop(0), stop=self.stop)


class Server:
    """Answers turns as /generate does, of a model that says these tokens."""

    def __init__(self, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokenizer, self.monkeypatch = tokenizer, monkeypatch
        self.sampler = make_sampler(tokenizer)
        self.sampler._max_length = 20_000
        self.renderer = renderer_of(DataConfig(chat_template=False), tokenizer)

    async def ask(self, turn: Turn) -> Completion:
        body = {
            "prompts": [list(turn.token_ids)],
            "begun": [turn.begun],
            "sampling": turn.sampling.model_dump(mode="json"),
            "tools": TOOLS,
        }
        _, (job,) = await self.sampler.read(json.dumps(body).encode())
        _, completion = await self.sampler.complete(job)
        return completion  # type: ignore[no-any-return]

    async def play(self, token_ids: list[int], sizes: list[int], stop: tuple[str, ...]) -> tuple[Rollout, Action]:
        speaks = SpeakingEngine(self.tokenizer, *token_ids)
        self.monkeypatch.setattr("hocket.server.vllm_requests.complete", speaks)
        parts = Parts(sizes, stop)
        prompt = Prompt(id="p", token_ids=array("I", pieces_of(self.tokenizer, "the END of STOP a")))
        bounds = limits(max_length=15_000)
        rollout = await Episode(prompt, slot(), lambda: parts, self.ask, self.renderer, bounds, TokenBudget()).play()
        assert rollout.error is None
        return rollout, parts.actions[-1]


@pytest.mark.parametrize("kind", KINDS)
async def test_text_stop_and_calls_of_a_turn_are_the_same_however_often_it_was_cut(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(2)
    tokenizer = KINDS[kind]
    server = Server(tokenizer, monkeypatch)
    stopped = cut_short = called = 0
    for _ in range(80):
        ids = [*random_ids(tokenizer, rng), *pieces_of(tokenizer, rng.choice(("", CALL, f"{CALL}END")))]
        stop = (rng.choice(("</tool_call>", "END", "STOP", random_text(rng, 3), f"b{SPECIAL[0]}", SPECIAL[1])),)
        cuts = sorted(rng.sample(range(1, len(ids)), min(len(ids) - 1, rng.randint(1, 3))))
        sizes = [end - start for start, end in itertools.pairwise([0, *cuts])]
        whole, at_once = await server.play(ids, [], stop)
        parts, last = await server.play(ids, sizes, stop)
        assert parts.sequences[0].token_ids == whole.sequences[0].token_ids
        assert (parts.text, parts.finish_reason) == (whole.text, whole.finish_reason)
        assert last.tool_calls == at_once.tool_calls
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        assert shown.startswith(whole.text) if whole.finish_reason == "stop" else shown == whole.text
        stopped += whole.finish_reason == "stop"
        cut_short += len(parts.sequences[0].token_ids) > len(pieces_of(tokenizer, "the END of STOP a")) + sizes[0]
        called += len(at_once.tool_calls)
    assert min(stopped, cut_short, called) > 15
