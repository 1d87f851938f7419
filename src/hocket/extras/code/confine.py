"""Refuse files (Landlock) and system calls (seccomp) to this process, then run a command.

The arguments are the number of the call seccomp, its filter in hexadecimal, the only paths that the
command sees (a:b; empty: all), and the command. It needs the standard library alone.
"""

import ctypes
import os
import struct
import sys

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every processor
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_RIGHTS = (13, 14, 15, 15, 16)  # how many rights of files Landlock's versions know, from 1 on
_LIBC = ctypes.CDLL(None, use_errno=True)


def see_only(paths: list[str]) -> None:
    """Allow this process no more than to read these folders, and to read and write these files."""
    version = _call(_CREATE_RULESET, None, 0, 1)
    rights = _RIGHTS[min(version, len(_RIGHTS)) - 1]
    rules = _call(_CREATE_RULESET, struct.pack("Q", (1 << rights) - 1), 8, 0)
    for path in paths:
        allowed = _READ_FILE | _WRITE_FILE
        if os.path.isdir(path):
            allowed = _EXECUTE | _READ_FILE | _READ_DIR
        beneath = struct.pack("=Qi", allowed, os.open(path, os.O_PATH))
        _call(_ADD_RULE, rules, 1, beneath, 0)
    _call(_RESTRICT_SELF, rules, 0)


def _call(*arguments: object) -> int:
    result: int = _LIBC.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


if __name__ == "__main__":
    number, code, paths, *command = sys.argv[1:]
    if paths:
        see_only(paths.split(":"))
    rules = ctypes.create_string_buffer(bytes.fromhex(code))
    num_rules = len(code) // 16  # of 8 bytes, two digits each
    _call(int(number), 1, 0, struct.pack("HP", num_rules, ctypes.addressof(rules)))
    os.execvpe(command[0], command, {})
