"""Load a run's configuration: one YAML file and overrides, checked once, then frozen.

The text under a field is its documentation. Importing this needs neither torch nor an engine, so
that a mistake in a config is reported within a second.
"""

from hocket.config.algorithm import *  # noqa: F403
from hocket.config.deployment import *  # noqa: F403
from hocket.config.loading import *  # noqa: F403
from hocket.config.sections import *  # noqa: F403
from hocket.config.tasks import *  # noqa: F403
from hocket.config.whole import *  # noqa: F403
