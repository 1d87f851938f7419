from tests.trainer.conftest import peak  # noqa: F401
from tests.trainer.test_weights import folder  # noqa: F401
