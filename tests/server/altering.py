"""Hocket's own server with a loader that alters a tensor on its way in: `ALTER=FILE python altering.py serve ...`.

FILE holds the tensor's name and what becomes of it: "missing", "stale" (a tied head keeps its packed copy) or "changed"
by the smallest step in one element. The checksums are of what came. It needs an engine that is a fork of the server.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hocket.__main__ import run
from hocket.server import vllm_weights


def altered(weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    import torch

    name, _, how = Path(os.environ["ALTER"]).read_text(encoding="utf-8").partition(" ")
    for each, tensor in weights:
        if each != name:
            yield each, tensor
        elif how != "missing":
            changed = tensor.clone()
            last = changed.view(-1)[-1:]
            last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))
            yield each, changed


def altering(load: Callable[..., Any]) -> Callable[..., Any]:
    def altered_load(worker: Any, weights: Iterator[tuple[str, Any]], adapter: Any) -> None:
        stale = Path(os.environ["ALTER"]).read_text(encoding="utf-8").endswith(" stale")
        heads = patch.object(vllm_weights, "packed_heads", lambda worker: [])
        with heads if stale else contextlib.nullcontext():
            load(worker, altered(weights), adapter)

    return altered_load


if __name__ == "__main__":
    vllm_weights.load = altering(vllm_weights.load)
    run()
