"""A plugin of the drills: every bucket of a collective update takes its time, so that a drill can hit it."""

import os
import time
from typing import Any

from hocket import weight_group

SECONDS = float(os.environ.get("SLOW_BUCKET_S", "0.5"))
pack = weight_group.pack


def slow_pack(*args: Any) -> Any:
    time.sleep(SECONDS)
    return pack(*args)


weight_group.pack = slow_pack
