"""An agent of two calls whose reward a policy learns in a few steps: the lower its two numbers, the more."""

from typing import Any

import openai

from hocket.envs import Task, agent

client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")


@agent("low")
async def low(task: Task) -> float:
    policy = client.with_options(base_url=task.base_url, api_key=task.api_key)
    chat: list[Any] = list(task.messages)
    reward = 0.0
    for _ in range(2):
        answer = await policy.chat.completions.create(model=task.model, messages=chat)
        said = answer.choices[0].message.content or ""
        reward += 0.5 - int(said) / 40 if said.isdecimal() and int(said) <= 20 else 0.0
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "lower"}]
    return reward
