from tests.commands.conftest import few_rows  # noqa: F401
from tests.commands.test_runs import dry_run  # noqa: F401
from tests.commands.test_sources import source  # noqa: F401
from tests.data.test_sources import tools_tokenizer  # noqa: F401
