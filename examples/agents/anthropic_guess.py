"""An agent for Anthropic's client, which asks the messages route."""

import anthropic

from hocket.envs import Task, agent

shared = anthropic.AsyncAnthropic(base_url="http://127.0.0.1", api_key="none")  # all episodes use its connections


@agent("anthropic_guess")
async def guess(task: Task) -> float:
    client = shared.with_options(base_url=task.anthropic_url, api_key=task.api_key)
    chat = list(task.messages)
    near = 0.0
    for _ in range(3):
        message = await client.messages.create(model=task.model, messages=chat, max_tokens=1024)
        answer = message.content[0].text
        if answer == task.answer:
            return 1.0
        if not answer:
            return 0.0
        gap = int(answer) - int(task.answer) if answer.isdecimal() else 10
        near = max(0.0, 1 - abs(gap) / 10)
        chat += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": "higher" if gap < 0 else "lower"},
        ]
    return near
