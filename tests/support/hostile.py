"""What hostile rewards of the tests call."""

import os
import time


def fork_and_sleep() -> None:
    if os.fork() == 0:
        time.sleep(600)


def daemonise() -> None:
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            for descriptor in range(3):
                os.close(descriptor)
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)
