"""A plugin of the drills: buckets of a collective update are small and take their time, so that a drill can hit it."""

import os
import time
from typing import Any

from hocket.protocol import nccl

SECONDS = float(os.environ.get("SLOW_BUCKET_S", "0.5"))
pack = nccl.pack


def slow_pack(*args: Any) -> Any:
    time.sleep(SECONDS)
    return pack(*args)


nccl.pack = slow_pack
nccl.BUCKET_BYTES = 1 << 20
