"""A plugin of the drills: buckets of a collective update are small and take their time, so that a drill can hit it."""

import os
import time
from typing import Any

from hocket.protocol import weight_group

SECONDS = float(os.environ.get("SLOW_BUCKET_S", "0.5"))
pack = weight_group.pack


def slow_pack(*args: Any) -> Any:
    time.sleep(SECONDS)
    return pack(*args)


weight_group.pack = slow_pack
weight_group.BUCKET_BYTES = 1 << 20
