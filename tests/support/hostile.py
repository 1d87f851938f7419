"""What hostile rewards of the tests call."""

import os
import sys
import time


def fork_and_sleep() -> None:
    if os.fork() == 0:
        time.sleep(600)


def answers() -> int:
    """Return the descriptor of the pipe into which this worker answers."""
    frame = sys._getframe(1)
    while "answers_fd" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    return int(frame.f_locals["answers_fd"])


def daemonise() -> None:
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            for descriptor in range(3):
                os.close(descriptor)
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)
