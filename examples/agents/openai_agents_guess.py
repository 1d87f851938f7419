"""An agent for the package openai-agents with its default model, which asks the responses route."""

from agents import Agent, ModelBehaviorError, OpenAIProvider, RunConfig, Runner

from hocket.envs import Task, agent

guesser = Agent(name="guesser")


@agent("openai_agents_guess")
async def guess(task: Task) -> float:
    provider = OpenAIProvider(base_url=task.base_url, api_key=task.api_key)
    config = RunConfig(model=task.model, model_provider=provider, tracing_disabled=True)
    chat = list(task.messages)
    near = 0.0
    for _ in range(3):
        try:
            result = await Runner.run(guesser, chat, run_config=config)
        except ModelBehaviorError:  # the answer had no end within rollout.max_tokens
            return 0.0
        answer = result.final_output
        if answer == task.answer:
            return 1.0
        if not answer:
            return 0.0
        gap = int(answer) - int(task.answer) if answer.isdecimal() else 10
        near = max(0.0, 1 - abs(gap) / 10)
        chat = [*result.to_input_list(), {"role": "user", "content": "higher" if gap < 0 else "lower"}]
    return near
