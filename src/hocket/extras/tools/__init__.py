"""Tools that the model calls: Python functions, and those of MCP servers."""

from hocket.observe.metrics import Metric, metric_table

metric_table("tools")(
    (
        Metric("tool/NAME/calls", "calls of a tool per episode"),
        Metric("tool/NAME/errors", "those whose result begins with `error: `, per episode"),
        Metric("tool/NAME/seconds", "seconds in a tool per episode"),
    )
)
