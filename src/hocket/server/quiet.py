"""Keeps warnings off the console that vLLM gives about what hocket does on purpose; logging.json names this filter.

That file also keeps the tool parsers quiet, which log a traceback for every call that a model writes wrongly.
"""

import logging

EXPECTED = (
    "The global random seed is set to",
    "Enforce eager set",
    "does not officially support disabling chunked prefill",
    "Inductor compilation was disabled by user settings",
    "Triton is not installed",
    "Model Runner V2 requires Triton",
    "is not found in LD_PRELOAD",
    "leaving Torch threads at",
    "Attempted to load weight",  # in another precision: the engine converts it
    "ParallelLMHead: Failed to load weights",  # a tied head: the worker renews it after every reload
    "RotaryEmbedding: Failed to load weights",  # it has none in a checkpoint
)


class ExpectedWarnings(logging.Filter):
    """Drops the expected warnings; everything else, and every error, passes."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the record is shown."""
        if record.levelno > logging.WARNING:
            return True
        message = record.getMessage()
        return not any(text in message for text in EXPECTED)
