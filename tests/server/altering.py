"""Hocket's own server with a loader that alters a tensor on its way in: `ALTER=FILE python altering.py serve ...`.

FILE holds the tensor's name and what happens to it: "missing", or anything else for the smallest change of one element.
The checksums are of what came. Works where the engine is a fork of the server, on a CPU.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    return lambda worker, weights, *rest: load(worker, altered(weights), *rest)


if __name__ == "__main__":
    vllm_weights.reload_worker = altering(vllm_weights.reload_worker)
    vllm_weights.load_adapter = altering(vllm_weights.load_adapter)
    run()
