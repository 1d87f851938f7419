from tests.trainer.conftest import peak  # noqa: F401
from tests.trainer.test_memory import wide_model  # noqa: F401
