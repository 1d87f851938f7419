import pytest
from tests.data.test_vision import folder  # noqa: F401
from tests.trainer.conftest import peak  # noqa: F401


@pytest.fixture
def model(untied_model: str) -> str:
    """What a stage begins with if nothing else is said."""
    return untied_model
