"""The commands of extras."""

import hocket
from hocket.commands.command import COMMANDS


def test_every_command_is_registered_by_the_module_that_the_table_names() -> None:
    for name, (module, _) in hocket.EXTRA_COMMANDS.items():
        assert COMMANDS.get(name).run.__module__ == module
