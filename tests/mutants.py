"""Change the source in one place at a time, and see whether its own fast tests notice: a mutant they pass survives.

Mutants are made by rule (tests/support/mutations.py), --number of them per file, and by tests/support/meant.py, which
also has those that are no fault. Without files: those that once had survivors. A mutant meets the tests of
tests/ROOM/test_MODULE.py, then those of the folder, then of tests/test_loop.py, but for those marked engine, ranks,
e2e, gpu or long, as far as they called the mutated function when nothing was mutated; and all of test_MODULE.py.
One with which a test takes a minute, or all ten times as long as that and two minutes, counts as killed.

Works on copies of the checkout in a temporary folder; Ctrl-C removes them. The status is 1 where fewer than --at-least
per cent are killed, 2 where tests fail without a mutant.
"""

import argparse
import contextlib
import ctypes
import difflib
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from support.meant import EQUIVALENT, MEANT
from support.mutations import Mutant, mutants, replaced

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    *sorted({row.path for row in MEANT}),
    *("algorithm/choices.py", "algorithm/samples.py", "rewards/scorer.py", "rewards/workers.py"),
    *("trainer/batching.py", "trainer/packing.py", "trainer/step.py"),
)
MARKS = "not engine and not ranks and not e2e and not gpu and not long"
PLAYED_IN_LOOP = {"algorithm", "data", "observe", "rollout", "sync", "trainer"}
HEAVY = ("numpy", "pydantic", "httpx", "psutil", "fastapi", "torch", "transformers", "pytest", "pytest_asyncio")
VARIABLES = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
OWN = {"hocket", "support", "tests", "conftest"}  # a copy's own, not the checkout's
MARK = "HOCKET_MUTANT"
NO_TESTS = 5  # pytest's exit status
SPARE_S = 120.0
LONGEST_TEST_S = 60  # what hangs is found in the first test that waits for it


class Outcome(NamedTuple):
    status: int  # pytest's, or 128 + signal
    took_s: float
    failed: str  # the first test
    seconds: dict[str, float]  # of each test
    calls: dict[str, list[str]]  # test: "path:function" of what it called; "": all tests did
    packages: list[str]  # modules of others that were imported
    output: str


class Watch:
    """A pytest plugin: runs the tests that are wanted, in their order, and sees what they call."""

    def __init__(self, wanted: Sequence[str], source: str) -> None:
        self._places = {name: place for place, name in enumerate(wanted)}
        self._source = source  # the folder of files whose functions are looked for; "": none
        self._called: set[str] = set()
        self._of_fixture: dict[str, set[str]] = {}
        self.failed = ""
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, list[str]] = {}
        if source:
            threading.settrace(self._trace)
            sys.settrace(self._trace)

    def _trace(self, frame: Any, event: str, argument: object) -> None:
        """Note a function as it is called; return no tracer of its lines."""
        code = frame.f_code
        if code.co_filename.startswith(self._source):
            self._called.add(f"{code.co_filename.removeprefix(self._source)}:{code.co_qualname}")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.calls[""] = sorted(self._called)  # while the tests were imported
        if self._places:
            kept = [item for item in items if item.nodeid in self._places]
            items[:] = sorted(kept, key=lambda item: self._places[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def watch(wanted: Sequence[str], source: str) -> Watch:
    """Return the plugin; pytest's wrappers need its decorator, and pytest is imported late."""
    import pytest

    class Tracing(Watch):
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: Any) -> Any:
            self._called = set()
            result = yield
            shared = (self._of_fixture.get(name, set()) for name in getattr(item, "fixturenames", ()))
            self.calls[item.nodeid] = sorted(self._called.union(*shared))
            return result

        @pytest.hookimpl(wrapper=True)
        def pytest_fixture_setup(self, fixturedef: Any) -> Any:
            """Have what a shared fixture calls count for all who use it."""
            before, self._called = self._called, set()
            result = yield
            if fixturedef.scope != "function":
                self._of_fixture.setdefault(fixturedef.argname, set()).update(self._called)
            self._called |= before
            return result

    return (Tracing if source else Watch)(wanted, source)


class Bench:
    """A copy of the checkout, in which one mutant at a time is tried."""

    times = itertools.count(int(time.time()) + 10)  # each file is newer than any compiled one

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = folder / "hocket"
        self.source = f"{self.tree}/src/hocket/"
        self.mark = str(folder)
        self.pid = 0
        names = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, self.tree / name)
        if (ROOT / ".venv").exists():
            (self.tree / ".venv").symlink_to((ROOT / ".venv").resolve())

    def write(self, path: str, text: str) -> None:
        file = Path(self.source, path)
        file.write_text(text, encoding="utf-8")
        stamp = next(self.times)
        os.utime(file, (stamp, stamp))

    def start(self, files: Sequence[str], wanted: Sequence[str] = (), *, traces: bool = False) -> None:
        """Fork a process that runs tests."""
        sys.stdout.flush()
        self.began = time.monotonic()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._run(parent, files, wanted, traces)
            finally:  # nothing of the parent's ends here
                os._exit(70)

    def _run(self, parent: int, files: Sequence[str], wanted: Sequence[str], traces: bool) -> NoReturn:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the parent
        if os.getppid() != parent:
            os._exit(70)
        os.setsid()
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(self.tree)
        os.environ |= {MARK: self.mark, "PYTHONPATH": f"{self.tree}/src"}
        for name in [*sys.modules]:
            if name.partition(".")[0] in OWN:
                del sys.modules[name]
        sys.path[:] = [path for path in sys.path if not Path(path).is_relative_to(ROOT) or ".venv" in path]
        sys.path.insert(0, f"{self.tree}/src")
        sys.argv = ["pytest"]
        import pytest

        plugin = watch(wanted, self.source if traces else "")
        options = ["-x", "-q", "-m", MARKS, "-p", "no:cacheprovider", f"--basetemp={self.folder}/tmp", "--tb=short"]
        options += [] if traces else [f"--timeout={LONGEST_TEST_S}"]
        status = int(pytest.main([*options, *files], plugins=[plugin]))
        sys.settrace(None)
        report = {"status": status, "failed": plugin.failed, "seconds": plugin.seconds, "calls": plugin.calls}
        report["packages"] = [name for name, module in sys.modules.items() if _is_installed(module)] if traces else []
        (self.folder / "report.json").write_text(json.dumps(report))
        sys.stdout.flush()
        os._exit(0)

    def ended(self, limit_s: float = float("inf")) -> Outcome | None:
        """Return how the tests ended, None while they run; those above the limit are killed."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        took = time.monotonic() - self.began
        if not pid and took < limit_s:
            return None
        self.stop()
        output = (self.folder / "log").read_text(errors="replace") if (self.folder / "log").exists() else ""
        report = self.folder / "report.json"
        if not pid or not report.exists():
            code = os.waitstatus_to_exitcode(status) if pid else -signal.SIGALRM
            return Outcome(128 + abs(code), took, "" if pid else "takes too long", {}, {}, [], output)
        found = json.loads(report.read_text())
        report.unlink()
        return Outcome(**found, took_s=took, output=output)

    def stop(self) -> None:
        """Kill the tests and what they started."""
        import psutil

        if not self.pid:
            return
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.pid or process.environ().get(MARK) == self.mark:
                    process.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.pid = 0
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)


def _is_installed(module: object) -> bool:
    return "site-packages" in str(getattr(getattr(module, "__spec__", None), "origin", None))


def tests_of(path: str) -> list[str]:
    """Return the test files of a source file, its own first."""
    room, _, module = path.rpartition("/")
    own = ROOT / "tests" / room / f"test_{module}"
    others = [file for file in sorted((ROOT / "tests" / room).glob("test_*.py")) if room and file != own]
    loop = [ROOT / "tests" / "test_loop.py"] if room in {*PLAYED_IN_LOOP, ""} else []
    return [str(file.relative_to(ROOT)) for file in [own, *others, *loop] if file.exists()]


def planned(path: str, options: argparse.Namespace) -> tuple[list[Mutant], list[str]]:
    """Return a file's mutants, and the meant ones that can't be made any longer."""
    source = Path(ROOT, "src/hocket", path).read_text(encoding="utf-8")
    made = mutants(path, source, 0 if options.only else options.number, options.seed, options.only)
    meant = {f"{path}:meant:{row.name}": row for row in MEANT if row.path == path}
    gone = [name for name, row in meant.items() if source.count(row.before) != 1]
    made += [replaced(name, source, *row[2:], path) for name, row in meant.items() if name not in gone]
    return [mutant for mutant in made if not options.only or mutant.id in options.only], gone


def wanted_by(mutant: Mutant, own: str, before: Outcome) -> list[str]:
    """Return the tests that a mutant meets, in their order: whole files, the cheapest ones first after its own."""
    called = f"{mutant.path}:{mutant.function}"
    at_import = not mutant.function or called in before.calls[""]
    calling = {name for name in before.seconds if at_import or called in before.calls.get(name, ())}
    chosen = calling or {*before.seconds}
    costs: dict[str, float] = {}
    for name in chosen:
        file = name.partition("::")[0]
        costs[file] = costs.get(file, 0.0) + before.seconds[name]
    ordered = sorted(chosen, key=lambda name: ((file := name.partition("::")[0]) != own, costs[file], file))
    return ordered + [name for name in before.seconds if name.startswith(f"{own}::") and name not in chosen]


def difference(mutant: Mutant) -> str:
    """Return the lines that differ, below the place."""
    source = Path(ROOT, "src/hocket", mutant.path).read_text(encoding="utf-8")
    lines = difflib.unified_diff(source.splitlines(), mutant.source.splitlines(), n=0, lineterm="")
    changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    meaning = f"  {mutant.meaning}" if mutant.meaning else ""
    return "\n".join([f"    src/hocket/{mutant.path}:{mutant.line}{meaning}", *(f"    {line}" for line in changed)])


def until_done(benches: Sequence[Bench], tasks: Iterator[Any], start: Callable[[Bench, Any], float]) -> Iterator[Any]:
    """Start each task on a free bench; yield (task, bench, outcome) as they end. `start` returns seconds at most."""
    running: dict[Bench, tuple[Any, float]] = {}
    free = [*benches]
    while True:
        while free and (task := next(tasks, None)) is not None:
            bench = free.pop()
            running[bench] = (task, start(bench, task))
        if not running:
            return
        for bench, (task, limit) in [*running.items()]:
            if outcome := bench.ended(limit):
                del running[bench]
                free.append(bench)
                yield task, bench, outcome
        time.sleep(0.05)


def unmutated(benches: Sequence[Bench], files: Sequence[str], options: argparse.Namespace) -> dict[str, Outcome]:
    """Run the tests of each file once, those of a folder together; return how they went."""
    tests = {path: tuple(options.tests or sorted(tests_of(path))) for path in files}

    def start(bench: Bench, chosen: tuple[str, ...]) -> float:
        bench.start(chosen, traces=True)
        return float("inf")

    found = {}
    for chosen, _, outcome in until_done(benches, iter(dict.fromkeys(tests.values())), start):
        print(f"unmutated: {len(outcome.seconds)} tests of {len(chosen)} files in {outcome.took_s:.0f} s", flush=True)
        if outcome.status != 0 or not outcome.seconds:
            print(f"{outcome.output[-3000:]}\nwithout a mutant, {outcome.failed or chosen} fails", file=sys.stderr)
            sys.exit(2)
        found[chosen] = outcome
        for name in outcome.packages:  # once, for all that are forked from here
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    return {path: found[chosen] for path, chosen in tests.items()}


def tried(benches: Sequence[Bench], made: Sequence[Mutant], before: dict[str, Outcome]) -> Iterator[dict[str, Any]]:
    """Yield how each mutant ended."""

    def start(bench: Bench, mutant: Mutant) -> float:
        tests = tests_of(mutant.path)
        wanted = wanted_by(mutant, tests[0], before[mutant.path])
        bench.write(mutant.path, mutant.source)
        bench.start([*dict.fromkeys(name.partition("::")[0] for name in wanted)], wanted)
        return SPARE_S + 10 * sum(before[mutant.path].seconds[name] for name in wanted)

    for mutant, bench, outcome in until_done(benches, iter(made), start):
        bench.write(mutant.path, Path(ROOT, "src/hocket", mutant.path).read_text(encoding="utf-8"))
        state = "survived" if outcome.status in (0, NO_TESTS) else "killed"
        yield _line(mutant, state, outcome.took_s, outcome.failed or f"status {outcome.status}")


def _line(mutant: Mutant, state: str, took_s: float = 0.0, by: str = "") -> dict[str, Any]:
    line = {"id": mutant.id, "state": state, "seconds": round(took_s, 1), "by": by if state == "killed" else ""}
    return line | {"place": f"src/hocket/{mutant.path}:{mutant.line}", "difference": difference(mutant)}


def table(files: Sequence[str], lines: Sequence[dict[str, Any]]) -> list[str]:
    rows = [f"{'file':<32}{'made':>6}{'killed':>8}{'survived':>10}{'equivalent':>12}{'%':>7}"]
    for path in [*files, "all"]:
        states = [line["state"] for line in lines if path == "all" or line["id"].startswith(f"{path}:")]
        killed, survived = states.count("killed"), states.count("survived")
        share = f"{100 * killed / (killed + survived):.1f}" if killed + survived else "-"
        rows.append(f"{path:<32}{len(states):>6}{killed:>8}{survived:>10}{states.count('equivalent'):>12}{share:>7}")
    return rows


def main(options: argparse.Namespace) -> int:
    files = [str(Path(file).resolve().relative_to(ROOT / "src" / "hocket")) for file in options.files] or [*FILES]
    if options.only:
        files = [*dict.fromkeys(name.partition(":")[0] for name in options.only)]
    plans = [planned(path, options) for path in files]
    made = [mutant for found, _ in plans for mutant in found]
    gone = [name for _, names in plans for name in names]
    for name in gone:
        print(f"{name} is gone: rewrite this row of tests/support/meant.py")
    for name in options.only:
        if name not in {mutant.id for mutant in made} and name not in gone:
            print(f"there is no mutant {name}; --list --number 0 has all of a file")
    if options.list:
        print("\n".join(f"{mutant.id}\n{difference(mutant)}" for mutant in made))
        return 0
    same = {(id, after) for id, after, _ in EQUIVALENT}
    equal = [mutant for mutant in made if (mutant.id, mutant.after) in same and not options.only]
    run = [mutant for mutant in made if mutant not in equal]
    lines = [_line(mutant, "equivalent") for mutant in equal]
    os.environ |= VARIABLES
    with tempfile.TemporaryDirectory(prefix="hocket-mutants-") as folder, contextlib.ExitStack() as stack:
        for name in HEAVY:
            importlib.import_module(name)
        benches = [Bench(Path(folder, str(number))) for number in range(options.jobs)]
        for bench in benches:
            stack.callback(bench.stop)
        before = unmutated(benches, [*dict.fromkeys(mutant.path for mutant in run)], options)
        for line in tried(benches, run, before):
            lines.append(line)
            number = f"[{len(lines) - len(equal)}/{len(run)}]"
            print(f"{number:<10}{line['state']:<9}{line['seconds']:>6.1f} s  {line['id']}  {line['by']}", flush=True)
            if line["state"] == "survived":
                print(line["difference"], flush=True)
            if options.json:
                options.json.write_text(json.dumps(lines, indent=1))
    print("\n".join(table(files, lines)))
    killed, survived = ([line["state"] for line in lines].count(state) for state in ("killed", "survived"))
    return int(100 * killed < options.at_least * (killed + survived))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("files", nargs="*", metavar="src/hocket/PATH.py", help="files to mutate")
    made.add_argument("--number", type=int, default=20, help="mutants per file by rule, 0: all (default: 20)")
    made.add_argument("--seed", type=int, default=0, help="which of them (default: 0)")
    made.add_argument("--only", nargs="+", default=[], metavar="ID", help="these mutants alone, equivalent or not")
    made.add_argument("--tests", nargs="+", default=[], metavar="FILE", help="meet these tests alone")
    made.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    made.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="at a time (default: processors)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there, too, after each")
    made.add_argument("--at-least", type=float, default=95.0, metavar="SHARE", help="per cent killed (default: 95)")
    return made


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore it
    try:
        sys.exit(main(parser().parse_args()))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
