"""`python3 run.py test`: what a change is likely to break, in five minutes on two cores; `--rest`: all the others."""

import argparse
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hocket.common.processes import contain

ROOT = Path(__file__).resolve().parents[1]
UNIT = "not long and not engine and not e2e and not gpu"
EPILOG = """Everything else goes to pytest:
  run.py test tests/algorithm     one folder, long tests too
  run.py test -k resume -x        tests with a word in their names, until one fails
  run.py test --seed 7 --shuffle  other random numbers, and another order
  run.py test -m gpu              what needs a GPU
Ctrl-C leaves nothing running."""


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="run.py test",
        description="Run the tests that need no GPU and that a change is likely to break: one real engine, one real "
        "quickstart, ranks, a drill, and whatever takes milliseconds. Five minutes on two cores; --rest: a quarter of "
        "an hour.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # pytest's own options may begin alike
    )
    part = command.add_mutually_exclusive_group()
    part.add_argument("--rest", action="store_true", help="run all the others, and those of optional packages")
    part.add_argument("--all", action="store_true", help="run both")
    part.add_argument(
        "--core", action="store_true", help="run the core's unit tests and three steps of the quickstart without extras"
    )
    return command


def main(argv: Sequence[str]) -> int:
    """Run the suite, or a part of it; return pytest's exit status."""
    options, words = parser().parse_known_args(argv)
    os.chdir(ROOT)
    pytest = [sys.executable, "-m", "pytest"]
    if any(word.startswith("tests") or word == "gpu" for word in words):  # chosen ones, or those that one GPU takes
        return contain([*pytest, "-m", "not gpu", *words])
    begun = time.monotonic()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of some hundred processes compiles hocket anew
    if options.core:
        return core([*pytest, "-n", str(workers()), "--no-loadscope-reorder", "-m", UNIT, *words])
    marks = "not gpu" if options.all else "long and not gpu" if options.rest else "not long and not gpu"
    # tests/conftest.py says what stays together in one process
    status = contain([*pytest, "-n", str(workers()), "--no-loadscope-reorder", "-m", marks, *words])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = f"{time.monotonic() - begun:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of processors"
    others = "run.py test" if options.rest else "run.py test --rest"
    print(took if options.all else f"{took}; the others are run by `python3 {others}`")
    return status


def core(pytest: Sequence[str]) -> int:
    """Run the core's tests, then the quickstart, in a copy of the tree that has no extras; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="hocket-core-") as folder:
        copy = Path(folder, "core")
        shutil.copytree(ROOT, copy, ignore=without_extras)
        copy.joinpath(".venv").symlink_to(Path(sys.prefix))
        copy.joinpath("checkpoints").symlink_to(ROOT / "checkpoints")  # which may hold large models of the user's
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy / "src")
        status = contain(pytest)
        if status == 0:
            quickstart = ["run.py", "quickstart", "trainer.steps=3", "eval.num_prompts=0", f"run.dir={folder}/run"]
            status = contain([sys.executable, *quickstart])
        os.chdir(ROOT)
    if status == 0:
        print("the core passes its tests and trains without src/hocket/extras")
    return status


def without_extras(folder: str, names: list[str]) -> list[str]:
    """Return what of a folder is not copied: extras, their tests, and what is no part of the repository."""
    inside = Path(folder).relative_to(ROOT)
    left_out = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
    if inside == Path("."):
        left_out |= {name for name in names if name.startswith(".venv")} | {".git", "runs", "checkpoints"}
    if inside in (Path("src/hocket"), Path("tests")):
        left_out.add("extras")
    return [name for name in names if name in left_out]


def workers() -> int:
    """Return how many processes share the tests: one a core, as each imports torch; more than four only wait."""
    return max(2, min(4, len(os.sched_getaffinity(0))))
