import asyncio

from hocket.rollout.budget import TokenBudget


async def test_a_budget_forgets_who_has_given_up_waiting() -> None:
    budget = TokenBudget(lambda: 10)
    await budget.start(8)
    first, second = asyncio.create_task(budget.start(5)), asyncio.create_task(budget.start(5))
    await asyncio.sleep(0)
    first.cancel()
    budget.change(-8)
    await second
    assert budget.held == 5
    third = asyncio.create_task(budget.start(5))
    await third
    assert budget.held == 10
