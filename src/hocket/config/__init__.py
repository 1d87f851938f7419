"""Load a run's configuration: one YAML file, `section.key=value` overrides, checked once, then frozen.

A field's description is its documentation: `python3 run.py config --reference` prints them all.
Without an engine and torch a mistake is reported within a second.
"""

from hocket.config.algorithm import *  # noqa: F403
from hocket.config.deployment import *  # noqa: F403
from hocket.config.elsewhere import *  # noqa: F403
from hocket.config.loading import *  # noqa: F403
from hocket.config.sections import *  # noqa: F403
from hocket.config.whole import *  # noqa: F403
