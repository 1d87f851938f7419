import pytest
from tests.commands.test_mixture import check_batch, config


async def test_one_batch_has_tools_beside_sources_without(monkeypatch: pytest.MonkeyPatch) -> None:
    await check_batch(config("eval.num_prompts=2"), monkeypatch)
