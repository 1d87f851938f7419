"""The command line in a process of its own: help without heavy imports, errors without tracebacks."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors import SafetensorError

import hocket
from hocket import protocol
from hocket.client.server import ServerClient
from hocket.commands.cli import DEFAULTS, main
from hocket.commands.command import COMMANDS
from hocket.errors import ConfigError, ServerError
from support import fakes

ROOT = Path(__file__).parents[2]


def python(*arguments: str, env: Mapping[str, str] = MappingProxyType({}), **streams: Any) -> Any:
    """Runs Python to its end with nothing else in its environment."""
    env = {"PYTHONPATH": str(ROOT / "src"), **env}
    return subprocess.run([sys.executable, *arguments], text=True, timeout=600, check=False, env=env, **streams)


@pytest.mark.parametrize("command", sorted({*hocket.COMMANDS} - {"install", "test"}))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"run.py {command}" in out
    assert ("section.key=value" in out) == (command not in ("ledger", "doctor", "new", "select", "watch", "report"))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("train --trainer.steps=5", "--trainer.steps=5; settings have no dashes: trainer.steps=5"),
        ("serve --nothing_known 8", "--reference` lists all; settings have no dashes: section.key=value"),
    ],
)
def test_an_option_that_is_none_is_answered_by_how_settings_look(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(typed.split())
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


FULL = "No space left on device"
ANY = "in run.dir, in TMPDIR, or where the output goes"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.EFBIG, "File too large"),
            "error: [Errno 27] File too large; raise the shell's limit of file sizes (ulimit -f)",
        ),
        (OSError(errno.ENOSPC, FULL, "runs/a"), f"error: [Errno 28] {FULL}: 'runs/a'; free space there"),
        (OSError(errno.ENOSPC, FULL), f"error: [Errno 28] {FULL} {ANY}; free space there"),
        (OSError(errno.EROFS, "Read-only file system", "a"), "Read-only file system: 'a'; mount it writable"),
        (
            OSError(errno.EACCES, "Permission denied", "a"),
            f"give user {os.getuid()} access to it (in Docker: HOCKET_USE",
        ),
        (OSError(errno.ENOTDIR, "Not a directory", "a"), "Not a directory: 'a'; a file is in the way: move it, or n"),
        (
            SafetensorError(f"I/O error: {FULL} (os error 28)"),
            f"error: I/O error: {FULL} (os error 28) {ANY}; free space",
        ),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "[Errno 32] Broken pipe. This was not foreseen"),  # another one
        (KeyError("x"), r"KeyError: 'x'. This was not foreseen; to report it, the traceback is in "),
        (OSError(errno.ENOTCONN, "no"), r"[Errno 107] no. This was not foreseen; to report it, the traceback is in "),
    ],
)
def test_an_error_that_nobody_foresaw_is_one_line_too_and_its_traceback_is_at_hand(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failing = replace(COMMANDS.get("config"), run=Mock(side_effect=error))
    monkeypatch.setitem(COMMANDS.items, "config", failing)
    assert main(["config"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    kept = [*tmp_path.iterdir()]
    assert len(kept) == ("not foreseen" in said)
    if kept:
        assert line.endswith(str(kept[0]))
        assert kept[0].read_text().startswith("Traceback (most recent call last)")
    assert main(["config", "--traceback"]) == 1
    assert os.environ["HOCKET_TRACEBACK"] == "1"  # for the processes that a command starts
    said_at_length = capsys.readouterr().err
    assert said_at_length.startswith("Traceback (most recent call last)")
    assert said_at_length.splitlines()[-1].startswith("error: ")


def test_an_interrupted_run_says_once_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.commands.runs.train", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)  # as a trainer in this process leaves them
    folder = tmp_path / "checkpoints" / "step_000050"
    folder.mkdir(parents=True)
    for where in ("the start, as there is no checkpoint yet", folder):
        assert main(["train", f"run.dir={tmp_path}", "--traceback", "checkpoint.resume=true", "trainer.seed=1"]) == 130
        typed = f"python3 run.py train run.dir={tmp_path} trainer.seed=1 checkpoint.resume=true"
        assert capsys.readouterr().err == f"interrupted; to go on from {where}: {typed}\n"
        (folder / "COMPLETE").touch()
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    again = f"the same launcher with train run.dir={tmp_path} checkpoint.resume=true"
    for rank, said in (("1", ""), ("0", f"interrupted; to go on from {folder}: {again}\n")):
        monkeypatch.setenv("RANK", rank)
        assert main(["train", f"run.dir={tmp_path}"]) == 130
        assert capsys.readouterr().err == said
    with monkeypatch.context() as patched:
        patched.setattr("hocket.commands.cli.read_settings", Mock(side_effect=KeyboardInterrupt))
        assert main(["train"]) == 130
    assert capsys.readouterr().err == "interrupted\n"  # before there was anything to go on with
    monkeypatch.setattr("hocket.launch.die_with_launcher", lambda: True)  # which says it
    assert main(["train"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("command", "ended", "written", "told"),
    [
        ("train", ServerError("it is gone", code="unreachable"), "COMPLETE", True),
        ("train", ServerError("it is gone", code="unreachable"), "state.json", False),  # no whole checkpoint
        ("train", ConfigError("another process has the folder, and makes checkpoints"), "COMPLETE", False),
        ("train", MemoryError(), "COMPLETE", True),
        ("launch", 137, "COMPLETE", True),  # a rank that was killed for its memory
        ("quickstart", 1, "COMPLETE", True),
        ("launch", 3, "COMPLETE", False),  # the run is whole
    ],
)
def test_what_ends_a_run_after_a_checkpoint_says_how_to_go_on(
    command: str,
    ended: int | Exception,
    written: str,
    told: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hocket.commands.runs.train", run := ends(tmp_path, ended, written))
    monkeypatch.setattr("hocket.launch.launch", run)
    check_advice(command, ended, told, tmp_path, capsys, monkeypatch)


def ends(tmp_path: Path, ended: int | Exception, written: str) -> Callable[..., int]:
    """Returns what ends like this, when it has written a file of a checkpoint."""

    def run(*_: object, **__: object) -> int:
        folder = tmp_path / "run" / "checkpoints" / "step_000050"
        folder.mkdir(parents=True)
        (folder / written).touch()
        if isinstance(ended, Exception):
            raise ended
        return ended

    return run


def check_advice(
    command: str,
    ended: int | Exception,
    told: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks what a command says behind its end."""
    monkeypatch.setattr(sys, "argv", ["run.py"])
    status = main([command, f"run.dir={tmp_path}/run"])
    *_, last = capsys.readouterr().err.splitlines() or [""]
    where = f"{tmp_path}/run/checkpoints/step_000050: python3 run.py {command} "
    assert last.startswith(f"checkpointed; to go on from {where}") == told
    assert last.endswith(f"run.dir={tmp_path}/run checkpoint.resume=true") == told
    assert status == (1 if isinstance(ended, Exception) else ended)
    assert main([command, f"run.dir={tmp_path}/run", "trainer.step=1"]) == 1
    assert "to go on" not in capsys.readouterr().err  # a mistake before anything ran


def test_checkpoints_of_another_run_are_no_news_of_a_command_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEFAULTS, "quickstart", f"{ROOT}/config/quickstart.yaml")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "quickstart" / "checkpoints"

    def fails(*_: object) -> None:
        (folder / "step_000001").mkdir(parents=True)
        (folder / "step_000001" / "COMPLETE").touch()
        raise ServerError("it is gone", code="unreachable")

    monkeypatch.setattr("hocket.server.main.serve", fails)  # beside a trainer, which goes on
    monkeypatch.setattr("hocket.launch.launch", lambda *_: 1)  # in runs/quickstart-2
    assert main(["serve", "run.dir=runs/quickstart"]) == main(["quickstart"]) == 1
    assert "checkpointed" not in capsys.readouterr().err


PRINTS = {  # a command → what writes far more than a pipe holds, or writes after its reader has gone
    "config --reference": "",
    "": "import hocket; hocket.COMMANDS['test'] = 'x' * 1_000_000",
    "config": "import dataclasses; from hocket.commands import cli\n"
    "from hocket.commands.command import COMMANDS\n"
    "from hocket.observe.console import Console\n"
    "says = lambda args: [Console(9).say('x' * 100_000) for _ in range(9)]\n"
    "COMMANDS.items['config'] = dataclasses.replace(COMMANDS.items['config'], run=says)",
    "config nowhere.yaml": "import os; os.dup2(1, 2)",
}


@pytest.mark.parametrize("command", PRINTS)
def test_a_command_whose_output_nobody_reads_ends_quietly(command: str, tmp_path: Path) -> None:
    check_quiet(command.split(), PRINTS[command], "hocket.commands.cli" if command else "run", tmp_path)


def check_quiet(words: Sequence[str], prints: str, door: str, tmp_path: Path) -> None:
    """Runs a command, whose process first does `prints`, by the main function of a module, and reads nothing of it."""
    program = tmp_path / "program.py"
    run = f"from hocket.common.processes import exit_with; from {door} import main; exit_with(main)"
    program.write_text(f"import sys\n{prints}\nsys.path.insert(0, {str(ROOT)!r}); {run}\n")
    reader, writer = os.pipe()
    os.close(reader)
    ended = python(str(program), *words, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_training_chooses_torchs_allocator_before_torch_is_imported() -> None:
    code = """if True:
        import os, sys, types
        sys.modules["hocket.commands.runs"] = commands = types.ModuleType("hocket.commands.runs")
        commands.train = lambda config, dry_run: print(os.environ["PYTORCH_CUDA_ALLOC_CONF"], "torch" in sys.modules)
        from hocket.commands.cli import main
        main(["train", "trainer.steps=1"])
    """
    for own in ({}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}):
        said = python("-c", code, capture_output=True, env=own).stdout
        assert said == f"{own.get('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:True')} False\n"


def test_an_interrupt_while_the_process_exits_changes_nothing() -> None:
    code = (
        "import atexit, os, runpy, signal, sys, time\n"
        "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0.1)))\n"
        "sys.argv = ['hocket', 'config', 'trainer.steps=0']; runpy.run_module('hocket', run_name='__main__')"
    )
    result = python("-c", code, capture_output=True)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("settings", [[], ["data.system_prompt=Add."]])
def test_a_question_follows_the_system_prompt_of_the_training(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[protocol.GenerateRequest] = []

    async def ask(_: ServerClient, request: protocol.GenerateRequest, *, timeout_s: float) -> protocol.GenerateResponse:
        asked.append(request)
        return protocol.GenerateResponse(
            version=1, model="", completions=[[fakes.completion(5, logprobs=(-0.5,), text="2")]]
        )

    monkeypatch.setattr(ServerClient, "ask", ask)
    main(["generate", "-p", "1 + 1", *settings])
    system = [{"role": "system", "content": "Add."}] if settings else []
    assert asked[0].prompts == [[*system, {"role": "user", "content": "1 + 1"}]]
    assert capsys.readouterr().out == "2\n"


@pytest.mark.parametrize("command", sorted(COMMANDS.names & {*hocket.COMMANDS}))
def test_the_help_of_a_command_has_two_examples_its_config_s_default_and_its_page(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    help_ = capsys.readouterr().out
    examples = help_.partition("examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) == 2
    assert [line for line in examples if not line.startswith(f"  run.py {command}")] == []
    page = help_.partition("docs: ")[2].strip()
    assert (ROOT / page).is_file()
    assert ("Without one: config.yaml of this folder" in help_) == ("section.key=value" in help_)


def test_a_command_without_a_config_takes_the_one_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config"]) == 0
    assert "steps: 7" not in capsys.readouterr().out
    (tmp_path / "config.yaml").write_text("trainer: {steps: 7}\n")
    assert main(["config"]) == 0
    printed = capsys.readouterr()
    assert "steps: 7\n" in printed.out
    assert printed.err == "hocket: settings of config.yaml in this folder\n"
    assert main(["config", f"{ROOT}/config/sort.yaml"]) == 0
    assert "steps: 7\n" not in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hocket {hocket.__version__}\n"


@pytest.mark.parametrize("command", ["quickstart", "launch", "serve"])
def test_without_an_engine_a_command_names_the_extras_to_install(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for engines in ("ENGINES", "SERVER_ENGINES"):
        monkeypatch.setattr(f"hocket.common.environment.{engines}", ("torch", "no_vllm_here"))
    assert main([command]) == 1
    error = capsys.readouterr().err
    assert 'needs no_vllm_here: pip install "hocket[cpu]" --extra-index-url' in error
    assert 'pip install "hocket[cuda]"' in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        ("deepspeed.runtime", 'error: this command needs deepspeed: pip install "hocket[cpu]"'),
        ("sympy", "error: ModuleNotFoundError: No module named 'sympy'. This was not foreseen"),
    ],
)
def test_only_a_missing_engine_is_answered_by_the_extras(
    module: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*_: object, **__: object) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("hocket.commands.runs.train", train)
    assert main(["train"]) == 1
    assert sentence in capsys.readouterr().err
