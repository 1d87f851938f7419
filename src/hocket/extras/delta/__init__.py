"""Weight versions as what has changed since the one before (sync.backend=delta)."""

from hocket.observe.metrics import Metric, metric_table

metric_table("delta")(
    (Metric("sync/changed", "sync.backend=delta: share of weights with changed bits"),)
)
