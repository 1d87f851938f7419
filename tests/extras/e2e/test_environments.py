"""Tools and agents on a real server: their calls and answers, what is selected of them, and policies that learn."""

import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from tests.e2e.test_environments import SOON, groups_of, largest_gap, learns

from hocket.client.server import ServerClient
from hocket.config import DataConfig
from hocket.data import tokenizer
from hocket.extras.select import select
from hocket.extras.stages.demonstrations import load_demonstrations
from hocket.protocol import SamplingParams, SessionRequest
from support.processes import ROOT, START_S, Command

pytestmark = [pytest.mark.e2e, pytest.mark.long]


async def test_calls_are_parsed_by_the_server_and_answered_in_the_models_own_format(port: int, runs: Path) -> None:
    groups = await groups_of("calculator", port, runs)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    called = [rollout for rollout in rollouts if rollout.sequences[0].turns > 1]
    assert len(called) > 20
    tokens = tokenizer.load(str(ROOT / "checkpoints" / "tiny-tools"))
    answered = 0
    for rollout in called:
        call = json.loads(
            rollout.sequences[0].dialogue[0]["content"].removeprefix("<tool_call>").removesuffix("</tool_call>")
        )
        told = rollout.sequences[0].dialogue[1]
        assert told["role"] == "tool"
        if told["content"].lstrip("-").isdigit():
            answered += 1
            assert int(told["content"]) == eval(call["arguments"]["expression"])  # digits and one operator
        text = tokens.decode(rollout.sequences[0].token_ids)
        assert text.startswith("<|system|>Tools: calculate(expression)<|end|><|user|>Compute: ")
        assert f"</tool_call><|end|><|tool|>{told['content']}<|end|><|assistant|>" in text
    assert answered > 20
    assert largest_gap([rollout.sequences[0] for rollout in called[:40]]) < 1e-4


PROGRAM = """
import json, sys
import openai

task = json.load(sys.stdin)
client = openai.OpenAI()  # its URL, key and model come from the environment, as for every program
chat = task["messages"]
first = client.chat.completions.create(model="gpt-4o", messages=chat, temperature=0).choices[0].message.content
chat += [{"role": "assistant", "content": first}, {"role": "user", "content": "higher"}]
stream = client.chat.completions.create(model="gpt-4o", messages=chat, stream=True)
second = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
chat[:] = [{"role": "user", "content": f"You said {second}"}]  # the rest is forgotten
client.chat.completions.create(model="gpt-4o", messages=chat, max_tokens=2)
print(f"{first} and {second}")
print("reward:", len(second) / 10)
"""


async def test_any_program_with_an_openai_client_is_recorded_token_by_token(
    port: int, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = f"{sys.executable} {tmp_path}/program.py"
    overrides = [f"env={{name: agent, command: '{command}', concurrency: 2}}", "plugins=[]"]
    groups = await groups_of("agent", port, runs, *overrides, num_prompts=2, group_size=2)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [score.error for group in groups for score in group.scores] == [None] * 4
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    assert largest_gap(sequences) < 1e-4
    tokens = tokenizer.load(str(ROOT / "checkpoints" / "tiny-tools"))
    for rollout in rollouts:
        chat, last = rollout.sequences
        first, second = (said["content"] for said in chat.dialogue if said["role"] == "assistant")
        text = f"<|user|>Guess: 1 to 20<|end|><|assistant|>{first}<|end|><|user|>higher<|end|><|assistant|>{second}"
        assert tokens.decode(chat.token_ids).removesuffix("<|end|>") == text
        assert tokens.decode(last.token_ids).startswith(f"<|user|>You said {second}<|end|><|assistant|>")
        assert (chat.turns, last.turns, sum(last.mask)) == (2, 1, 2)
        assert rollout.reward == len(second) / 10
    assert len({tuple(rollout.sequences[0].token_ids) for rollout in rollouts}) > 1  # temperature 0 was not granted


async def test_an_agent_s_tools_are_shown_to_the_model_and_its_calls_parsed(port: int) -> None:
    function = {
        "name": "calculate",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    }
    tools: list[Any] = [{"type": "function", "function": function}]
    chat: list[Any] = [{"role": "user", "content": "Compute: 12*34"}]
    bounds = {"max_length": 512, "max_calls": 40, "idle_timeout_s": 60}
    async with ServerClient(f"http://127.0.0.1:{port}") as server:
        request = SessionRequest(sampling=SamplingParams(max_tokens=80, seed=5), **bounds)
        session = await server.ask(request, timeout_s=60)
        url = f"{server.url}/sessions/{session.id}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key) as client:
            for _ in range(40):
                answer = await client.chat.completions.create(model="any", messages=chat, tools=tools)
                if answer.choices[0].message.tool_calls:
                    break
        calls = (await server.close_session(session.id, timeout_s=60)).calls
    (made,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(made, ChatCompletionMessageFunctionToolCall)
    tokens = tokenizer.load(str(ROOT / "checkpoints" / "tiny-tools"))
    asked = tokens.decode(calls[-1].prompt_token_ids)
    assert asked == "<|system|>Tools: calculate(expression)<|end|><|user|>Compute: 12*34<|end|><|assistant|>"
    assert calls[-1].completion is not None
    said = tokens.decode(calls[-1].completion.token_ids).removesuffix("<|end|>")
    wrote = json.loads(said.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert (made.function.name, json.loads(made.function.arguments)) == (wrote["name"], wrote["arguments"])


def test_the_policy_learns_from_what_an_agent_returns(port: int, runs: Path) -> None:
    """From calls for numbers: the lower both are, the more. Hints (config/agent.yaml) take many more."""
    settings = [f"server.port={port}", f"run.dir={runs}/agent", "trainer.steps=6", "eval.num_prompts=0"]
    own = [
        "plugins=[config/tiny_tools.py,tests/extras/agents/low_agent.py]",
        "env.function=low",
        "trainer.learning_rate=1e-3",
    ]
    sizes = ["rollout.prompts_per_step=8", "rollout.group_size=8"]
    with Command(["train", "config/agent.yaml", *settings, *own, *sizes], runs.parent / "agent.log") as process:
        assert process.wait_end(START_S + 300) == 0, process.output()
    metrics = [json.loads(line) for line in (runs / "agent" / "metrics.jsonl").read_text().splitlines()][1:]
    rewards = [step["reward/mean"] for step in metrics]
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.2, rewards
    assert max(step["train/logprob_gap"] for step in metrics) < 1e-3
    assert {step["rollout/turns_mean"] for step in metrics} == {2.0}


def check_that_selected_rows_are_what_was_sampled(run: Path) -> None:
    """Compares the tokens and the mask of each selected conversation with those of the run's sequences."""
    select(run, run / "rows.jsonl", min_reward=None, per_prompt=2)
    rows = load_demonstrations(DataConfig(source=f"{run}/rows.jsonl"), tokenizer.load("checkpoints/tiny-tools"), 256)
    lines = (line for file in (run / "rollouts").glob("step_*.jsonl") for line in file.read_text().splitlines())
    sampled = {(tuple(row["token_ids"]), tuple(map(bool, row["mask"]))) for row in map(json.loads, lines)}
    assert len(rows) > 40
    assert {(tuple(row.token_ids), row.mask) for row in rows} <= sampled


@pytest.mark.parametrize(("name", "steps", "rise", "more"), [("guess", 16, 0.08, SOON), ("calculator", 18, 0.1, ())])
def test_a_policy_learns_and_selected_rows_are_what_was_sampled(
    port: int,
    runs: Path,
    name: str,
    steps: int,
    rise: float,
    more: tuple[str, ...],
) -> None:
    learns(port, runs, name, steps, rise, *more)
    check_that_selected_rows_are_what_was_sampled(runs / name)
