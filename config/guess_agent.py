"""An agent that finds a number by its hints: ordinary code with the openai client, which knows nothing of training.

python3 run.py quickstart config/agent.yaml
"""

from typing import Any

import openai

from hocket.envs import Task, agent

GUESSES = 3
client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")  # whose connections all episodes share


@agent("guess")
async def guess(task: Task) -> float:
    """Return how near the last guess was: 1 where the number is found, 0 from a distance of 10 on."""
    policy = client.with_options(base_url=task.base_url, api_key=task.api_key)
    number, reward = int(task.answer or ""), 0.0
    chat: list[Any] = list(task.messages)
    for _ in range(GUESSES):
        answer = await policy.chat.completions.create(model=task.model, messages=chat)
        said = answer.choices[0].message.content or ""
        if not said.isdecimal():
            return 0.0
        if int(said) == number:
            return 1.0
        reward = max(0.0, 1 - abs(int(said) - number) / 10)
        hint = "higher" if int(said) < number else "lower"
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
    return reward
