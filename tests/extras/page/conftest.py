from tests.trainer.conftest import peak  # noqa: F401
from tests.trainer.test_trainer import trainer  # noqa: F401
