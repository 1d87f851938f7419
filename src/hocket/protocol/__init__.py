"""What crosses between the processes: messages, and what both ends do with tensors."""

from hocket.protocol.messages import *  # noqa: F403
