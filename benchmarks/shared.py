"""What benchmarks have in common: options, a second process, a server, a random model. Not a benchmark itself.

Importing it makes src/ and tests/ importable: tests/support/processes.py starts hocket's commands.
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = str(ROOT / "config" / "quickstart.yaml")
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parser(doc: str | None, settings: str = "", **options: tuple[Any, str]) -> argparse.ArgumentParser:
    """Returns a parser with a script's docstring as its help.

    Args:
        settings: what hocket's settings, the positional arguments, are for; "": there are none.
        options: (default, which says the type; help).
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=_Help)
    for name, (default, text) in options.items():
        kind: dict[str, Any] = {"type": type(default), "default": default}
        if isinstance(default, list):
            kind = {"type": numbers, "default": ",".join(map(str, default)), "metavar": "N,N"}
        elif isinstance(default, bool):
            kind = {"action": "store_true"}
        made.add_argument("--" + name.replace("_", "-"), help=text, **kind)
    if settings:
        made.add_argument("settings", nargs="*", help=settings)
    return made


@contextlib.contextmanager
def beside(work: Callable[..., None], *arguments: Any, engine: bool = False) -> Iterator[Connection]:
    """Runs work(connection, *arguments) in a second process during the body: it ends once the connection is closed.

    Args:
        engine: whether it starts an engine, which ends with the process that has started it.
    """
    ours, theirs = multiprocessing.Pipe()
    context: Any = multiprocessing.get_context("spawn" if engine else "forkserver")
    process = context.Process(target=_work, args=(os.getpid() if engine else None, work, theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(60)
        process.kill()
        process.join()


def _work(parent: int | None, work: Callable[..., None], *arguments: Any) -> None:
    from hocket.common.processes import die_with_parent

    if parent is not None:
        die_with_parent(parent, signal.SIGKILL)
    with contextlib.suppress(EOFError):
        work(*arguments)


@contextlib.contextmanager
def serving(settings: Sequence[str], log: Path, **process: Any) -> Iterator[Any]:
    """Runs `serve` during the body; `process`: further arguments of tests/support/processes.py, Process."""
    from support.processes import Process

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the server, too
    with Process(["serve", *settings], log, **process) as server:
        server.wait_for(lambda: "ready on" in server.output(), "the server is ready")
        yield server
        server.end()


def make_model(folder: Path, hidden: int = 768, *, weights: bool = True, **sizes: int) -> None:
    """Saves a random Qwen2 in bfloat16, or its config alone, with the tokenizer of tiny-sort. Default: 100.1 M."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    default = {
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3 // 64 * 64,
        "num_hidden_layers": 12,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 1 if hidden == 64 else 2,
        "max_position_embeddings": 512,
    }
    config = Qwen2Config(**(default | sizes), tie_word_embeddings=True)
    config.save_pretrained(folder)
    if weights:
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "checkpoints" / "tiny-sort" / name, folder)
