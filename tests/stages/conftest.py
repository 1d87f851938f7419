import pytest
from tests.trainer.conftest import peak, tied_model, untied_model  # noqa: F401


@pytest.fixture
def model(untied_model: str) -> str:  # noqa: F811
    """What a stage begins with if nothing else is said."""
    return untied_model
