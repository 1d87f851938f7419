"""A plugin of the drills: every bucket of a collective update takes its time, so that a drill can hit it."""

import os
import time
from typing import Any

from hocket import transfer

SECONDS = float(os.environ.get("SLOW_BUCKET_S", "0.5"))
pack = transfer.pack


def slow_pack(*args: Any) -> Any:
    time.sleep(SECONDS)
    return pack(*args)


transfer.pack = slow_pack
