"""Real child processes: they end when told to, with everything they started, and when their parent is killed."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from hocket import config, launch
from hocket.common.files import make_unused, unused
from hocket.errors import ConfigError, ServerError
from hocket.launch import Child
from support.parameters import long
from support.processes import is_gone, wait_for
from support.programs import SOURCE, write_program

WITH_CHILD = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.{handler});"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print(p.pid, flush=True); time.sleep(600)"
)


def first_line(log: Path) -> str:
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"), "a line in the log")
    return log.read_text().splitlines()[0]


@pytest.mark.parametrize(("handler", "killed_by"), [("SIG_DFL", signal.SIGTERM), ("SIG_IGN", signal.SIGKILL)])
def test_stopping_a_child_ends_what_it_started_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: str, killed_by: signal.Signals
) -> None:
    monkeypatch.setattr(launch, "STOP_TIMEOUT_S", 60.0 if handler == "SIG_DFL" else 1.0)
    child = Child(["-c", WITH_CHILD.format(handler=handler)], env={}, log=tmp_path / "log")
    grandchild = int(first_line(tmp_path / "log"))
    child.refuse_dead()  # it runs: no error
    launch.stop([child])
    assert child.returncode == -killed_by
    wait_for(lambda: is_gone(grandchild), "the grandchild is gone")


def test_a_second_child_keeps_what_the_first_one_wrote_and_ends_with_its_own_words(tmp_path: Path) -> None:
    log, say = tmp_path / "log", "import sys; sys.exit(sys.argv[1])"
    for word in ("first", "second"):
        child = Child(["-c", say, word], env={}, log=log)
        assert child.wait(60) == 1
    assert log.read_text() == "first\nsecond\n"
    assert child.last_words("it").splitlines()[1:] == ["second"]
    with log.open("a") as file:
        file.writelines(f"line {number}\n" for number in range(300_000))  # 3.5 MB
    tracemalloc.start()
    last = child.last_words("it").splitlines()[1:]
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert last == [f"line {number}" for number in range(299_985, 300_000)]
    assert most_bytes < 1_000_000  # it is not read as a whole


WAITS_FOR_THE_OTHER = """
import signal, sys, time; from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: Path(sys.argv[1]).touch())
print("ready", flush=True)
while not (Path(sys.argv[1]).exists() and Path(sys.argv[2]).exists()):
    time.sleep(0.02)
"""


def test_several_servers_are_stopped_at_the_same_time(tmp_path: Path) -> None:
    told = str(tmp_path / "a"), str(tmp_path / "b")
    children = [
        Child(["-c", WAITS_FOR_THE_OTHER, *names], env={}, log=tmp_path / f"log{number}")
        for number, names in enumerate((told, told[::-1]))  # each ends once both have been told to
    ]
    assert [first_line(tmp_path / f"log{number}") for number in (0, 1)] == ["ready", "ready"]
    launch.stop(children)
    assert [child.returncode for child in children] == [0, 0]  # none was killed


def test_a_child_of_a_background_job_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *handler: handlers.append(handler))
    monkeypatch.setattr(launch, "die_with_parent", lambda *_: None)
    handlers = list[tuple[object, ...]]()
    assert not launch.die_with_launcher()  # a command that a user has typed keeps what it inherits
    assert handlers == []
    monkeypatch.setenv(launch.PARENT_VARIABLE, str(os.getppid()))
    assert launch.die_with_launcher()
    assert handlers == [(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGUSR1)]


LAUNCH = """
import sys; from pathlib import Path; from hocket import config; from hocket import launch
sys.executable, folder = sys.argv[1], Path(sys.argv[2])
sys.exit(launch.launch(config.load(None, [f"run.dir={folder}"]), []))
"""
PYTHON = """#!{python}
import signal, sys, time; from pathlib import Path
command = Path("{folder}", sys.argv[4])
def end(*_):
    command.with_suffix(".ended").touch()
    sys.exit(130)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, end)
command.touch()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("signum", "ignored"), [("SIGINT", None), *long(("SIGTERM", None), ("SIGHUP", None)), ("SIGTERM", "SIGHUP")]
)
def test_a_launched_run_is_closed_when_it_is_interrupted_or_ended_or_its_terminal_is_closed_but_not_under_nohup(
    tmp_path: Path, signum: str, ignored: str | None
) -> None:
    """Serve and train are a program that notes how it was started and ended."""
    write_program(tmp_path / "python", PYTHON.format(python=sys.executable, folder=tmp_path))

    def inherit() -> None:
        for name in ("SIGINT", "SIGHUP"):
            signal.signal(signal.Signals[name], signal.SIG_IGN if name == ignored else signal.SIG_DFL)

    command = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, tmp_path / "python", tmp_path / "run"],
        env=os.environ | {"HOCKET_DEVICE": "cpu", "PYTHONPATH": str(SOURCE)},
        stderr=subprocess.DEVNULL,
        preexec_fn=inherit,
    )
    try:
        wait_for(lambda: all((tmp_path / name).exists() for name in ("serve", "train", "watch")), "all run", 60)
        if ignored:
            status = Path(f"/proc/{command.pid}/status").read_text()
            assert int(re.findall(r"SigIgn:\s(\w+)", status)[0], 16) >> signal.Signals[ignored] - 1 & 1
            command.send_signal(signal.Signals[ignored])
        command.send_signal(signal.Signals[signum])
        assert command.wait(60) != 0
    finally:
        command.kill()
        command.wait()
    assert {path.name for path in tmp_path.glob("*.ended")} == {"serve.ended", "train.ended", "watch.ended"}


RANK = """
import os, sys, time; from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "X")
folder = Path(sys.argv[1])
(folder / f"rank{os.environ['RANK']}").write_text(" ".join([str(os.getpid()), *(os.environ[name] for name in names)]))
while len(list(folder.iterdir())) < 3:
    time.sleep(0.05)
"""


def run_ranks(folder: Path, code: str = RANK, check: Callable[[], None] = lambda: None) -> int:
    (folder / "ranks").mkdir()
    command = ["-c", code, str(folder / "ranks")]
    return launch.run_ranks(command, 3, env={"X": "y"}, check=check, logs=folder / "logs")


def ranks_in(folder: Path) -> list[list[str]]:
    return [path.read_text().split() for path in sorted((folder / "ranks").iterdir())]


def test_ranks_run_together_and_find_each_other(tmp_path: Path) -> None:
    assert run_ranks(tmp_path) == 0
    (port,) = {words[6] for words in ranks_in(tmp_path)}
    assert [words[1:] for words in ranks_in(tmp_path)] == [
        [str(rank), str(rank), "3", "3", "127.0.0.1", port, "y"] for rank in range(3)
    ]


def test_a_rank_that_fails_ends_the_others_with_its_status_and_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(tmp_path, f"{RANK}\nif os.environ['RANK'] == '1': sys.exit('no room')\ntime.sleep(600)") == 1
    log = tmp_path / "logs" / "rank_1.log"
    assert f"rank 1 ended with status 1; the end of {log}:\nno room" in capsys.readouterr().err
    assert len(ranks_in(tmp_path)) == 3
    assert all(is_gone(words[0]) for words in ranks_in(tmp_path))


def test_ctrl_c_before_a_rank_can_take_it_interrupts_the_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_ranks(tmp_path, f"{RANK}\nimport signal; os.kill(os.getpid(), signal.SIGUSR1)")
    assert all(is_gone(words[0]) for words in ranks_in(tmp_path))


def test_ranks_end_with_what_the_check_raises(tmp_path: Path) -> None:
    def check() -> None:
        if len(ranks_in(tmp_path)) == 3:
            raise ServerError("gone", code="unreachable")

    with pytest.raises(ServerError):
        run_ranks(tmp_path, f"{RANK}\ntime.sleep(600)", check)
    wait_for(lambda: all(words and is_gone(words[0]) for words in ranks_in(tmp_path)), "the ranks are gone")


def placed(gpus: str, settings: list[str]) -> launch.Placement:
    values = config.load(None, settings)
    return launch.place(values.launch, values.server.tensor_parallel_size, list(gpus))


@pytest.mark.parametrize(
    ("gpus", "settings", "servers", "ranks"),
    [
        ("", [], [""], ("", 1)),
        ("", ["launch.servers=2", "launch.trainers=2"], ["", ""], ("", 2)),
        ("0", [], ["0"], ("0", 1)),
        ("0123", [], ["0", "1"], ("2,3", 2)),
        ("0123", ["server.tensor_parallel_size=2"], ["0,1"], ("2,3", 2)),
        ("01234567", ["server.tensor_parallel_size=2", "launch.trainers=2"], ["0,1", "2,3", "4,5"], ("6,7", 2)),
        ("01234567", ["launch.servers=6"], ["0", "1", "2", "3", "4", "5"], ("6,7", 2)),
        ("45012367", ["launch.servers=1"], ["4"], ("5,0,1,2,3,6,7", 7)),
        ("1230", ["launch.trainers=1"], ["1", "2", "3"], ("0", 1)),
        ("0123", ["launch.share_gpu=true"], ["0"], ("0", 1)),
    ],
)
def test_gpus_are_divided_between_servers_and_ranks(
    gpus: str, settings: list[str], servers: list[str], ranks: tuple[str, int]
) -> None:
    apart = len(gpus) > 1 and "launch.share_gpu=true" not in settings
    assert placed(gpus, settings) == (servers, *ranks, apart)


@pytest.mark.parametrize(
    ("gpus", "settings", "reason"),
    [
        ("0", ["launch.trainers=2"], "launch.trainers=2 needs 2 GPUs, and of 1 in all it has 1"),
        ("0123", ["launch.servers=4"], "launch.trainers=1 needs 1 GPUs, and of 4 in all it has 0"),
        ("01", ["server.tensor_parallel_size=4"], "launch.servers=1 needs 4 GPUs, and of 2 in all it has 2"),
    ],
)
def test_too_few_gpus_are_refused(gpus: str, settings: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        placed(gpus, settings)


def test_gpus_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_DEVICE", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert launch.visible_gpus() == ["2", "5"]
    for none in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert launch.visible_gpus() == []
    monkeypatch.delenv("HOCKET_DEVICE")
    monkeypatch.setattr(launch.environment, "has_cuda", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as a login node shares its user's shell
    assert launch.visible_gpus() == []


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.environment, "nvidia_smi", lambda column: ["0", "1"])
    monkeypatch.setenv("HOCKET_DEVICE", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7,1")
    with pytest.raises(ConfigError, match="names GPU 7, which nvidia-smi does not show: correct it, or set HOCKET_DEV"):
        launch.launch(config.load(), [], dry_run=True)
    for nonsense in ("abc", "0;1", "GPU0"):
        with pytest.raises(ConfigError, match=f"names '{nonsense}', which is no GPU's number or UUID: correct it"):
            launch.refuse_missing(["0", nonsense])
    launch.refuse_missing(["1", "0", "MIG-1f2e", "GPU-8932f937"])
    monkeypatch.setattr(launch.environment, "nvidia_smi", lambda column: [])
    launch.refuse_missing(["7"])  # a container may have GPUs without nvidia-smi


def test_a_page_that_would_let_other_machines_in_ends_a_launch_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "Child", lambda *_, **__: pytest.fail("it was started"))
    settings = [f"run.dir={tmp_path}/a", "observe.page=true", "observe.host=0.0.0.0"]
    with pytest.raises(ConfigError, match=r"observe\.host=0\.0\.0\.0 lets other machines in: set server\.token"):
        launch.launch(config.load(None, settings), settings)


def test_a_dry_run_says_what_would_run_where_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOCKET_DEVICE", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(launch.environment, "nvidia_smi", lambda column: ["0", "1", "2", "3"])
    ports = [8100, 8101]
    monkeypatch.setattr(launch, "free_port", lambda host, wanted: wanted)
    settings = ["server.port=8100", "server.host=localhost", f"run.dir={tmp_path}/a"]
    assert launch.launch(config.load(None, settings), settings, dry_run=True) == 0
    said = capsys.readouterr().out
    assert [f"server_{i}: http://localhost:{port} on GPU {i}" in said for i, port in enumerate(ports)] == [True, True]
    assert "trainer: 2 ranks on GPU 2,3" in said
    chosen = [*settings, "launch.servers=2", "launch.trainers=2", "launch.gpus_apart=true"]  # config.yaml has them
    serve = [f"-m hocket serve {shlex.join(chosen)} server.port={port}" for port in ports]
    urls = "'server.urls=[http://localhost:8100,http://localhost:8101]'"
    train = f"-m hocket train {shlex.join(chosen)} server.discover=null {urls}"
    assert said.splitlines()[-3:] == [
        f"CUDA_VISIBLE_DEVICES=0 {sys.executable} {serve[0]}",
        f"CUDA_VISIBLE_DEVICES=1 {sys.executable} {serve[1]}",
        f"CUDA_VISIBLE_DEVICES=2,3 {sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 {train}",
    ]
    assert not (tmp_path / "a").exists()
    monkeypatch.setattr(sys, "argv", ["./run.py"])  # which finds hocket's source
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launch.launch(config.load(None, settings), settings, dry_run=True)
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{sys.executable} ./run.py train ")


def test_a_launch_of_sides_that_share_their_gpus_gives_its_processes_settings_that_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOCKET_DEVICE", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(launch.environment, "nvidia_smi", lambda column: ["0", "1"])
    settings = ["launch.share_gpu=true", "launch.trainers=2", f"run.dir={tmp_path}/a"]
    assert launch.launch(config.load(None, settings), settings, dry_run=True) == 0
    typed = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert typed[0] == "CUDA_VISIBLE_DEVICES=0,1"
    config.load(None, typed[typed.index("train") + 1 :])  # the server has GPU 0, the ranks have both


def test_a_trainer_takes_the_url_of_a_server_on_ipv6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOCKET_DEVICE", "cpu")
    settings = ["server.host=::1", f"run.dir={tmp_path}/a"]
    launch.launch(config.load(None, settings), settings, dry_run=True)
    typed = shlex.split(capsys.readouterr().out.splitlines()[-1])
    (url,) = config.load(None, typed[typed.index("train") + 1 :]).server.urls
    assert url.startswith("http://[::1]:")


def test_a_dead_server_is_reported_once_and_the_last_one_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import os; print('hello', os.environ['X']); raise SystemExit(3)"
    ended = [Child(["-c", code], env={"X": "y"}, log=tmp_path / "logs" / name) for name in "ab"]
    for child in ended:
        wait_for(child.poll, "the child ends")
    with pytest.raises(ServerError, match=r"ended with status 3(.|\n)*hello y"):
        launch.refuse_all_dead(ended)
    said = capsys.readouterr().out
    assert said.count("ended with status 3") == 1
    assert "servers that are left: 1" in said


def test_what_comes_next_fits_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py"])
    run = tmp_path / "a"
    for version in ("v000001", "v000002", ".v000003.partial"):
        (run / "weights" / version).mkdir(parents=True)
    (run / "rollouts").mkdir()

    def lines(prompt: str, *settings: str) -> list[str]:
        (run / "rollouts" / "step_000001.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
        given = ["server.port=8100", f"run.dir={run}", *settings]
        return [
            line.partition(":  ")[2].strip() or line.strip() for line in launch.what_next(run, given).splitlines()[1:]
        ]

    assert lines("Add: 1 2") == [
        f"python3 run.py serve server.port=8100 run.dir={run}-2",
        f"python3 run.py train server.port=8100 run.dir={run}-2",
        f"python3 run.py serve server.port=8100 model.path={run}/weights/v000002",
        "python3 run.py generate server.port=8100 -p 'Add: 1 2'",
    ]
    (run / "weights" / "v000002" / "adapter_config.json").touch()
    *_, merge, serve, generate = lines("x" * 500, "model.lora={}")
    assert merge == f"python3 run.py export {run}/weights/v000002 {run}/model"
    assert serve.endswith(f"model.path={run}/model model.lora=null")
    assert generate.endswith(" -p PROMPT")


def test_a_port_in_use_is_replaced_by_a_free_one() -> None:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))  # bound, not listening: nobody else can take it meanwhile
        port = held.getsockname()[1]
        assert launch.free_port("127.0.0.1", port) == port
        held.listen()
        assert launch.free_port("127.0.0.1", port) != port
        for first in (port, 65534):  # or after the last one
            ports, claims = launch.free_ports("127.0.0.1", first, 4)
            claims.close()
            assert port not in ports
            assert len(set(ports)) == 4
            assert max(ports) < 1 << 16


def test_a_port_for_a_server_that_does_not_listen_yet_is_given_to_no_other_launch() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (first,), claim = launch.free_ports("127.0.0.1", port, 1)
    others, more = launch.free_ports("127.0.0.1", port, 2)
    assert first == port
    assert port not in others
    more.close()
    claim.close()
    (again,), claim = launch.free_ports("127.0.0.1", port, 1)
    claim.close()
    assert again == port


def test_a_run_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "quickstart"
    assert unused(run_dir) == run_dir
    run_dir.mkdir()
    (tmp_path / "quickstart-2").mkdir()
    assert unused(run_dir) == tmp_path / "quickstart-3"
    assert unused(tmp_path / "quickstart-2") == tmp_path / "quickstart-3"
    (tmp_path / "of-2024").mkdir()
    assert unused(tmp_path / "of-2024") == tmp_path / "of-2024-2"
    assert [make_unused(run_dir).name for _ in range(2)] == ["quickstart-3", "quickstart-4"]  # of two processes
