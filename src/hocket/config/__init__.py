"""Load a run's configuration: one YAML file and overrides, checked once, then frozen.

A field's description is its documentation. Without torch and an engine a mistake is reported within a second.
"""

from hocket.config.algorithm import *  # noqa: F403
from hocket.config.deployment import *  # noqa: F403
from hocket.config.loading import *  # noqa: F403
from hocket.config.sections import *  # noqa: F403
from hocket.config.tasks import *  # noqa: F403
from hocket.config.whole import *  # noqa: F403
