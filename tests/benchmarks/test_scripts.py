"""Every script of benchmarks/, examples/, docker/ and tests/deploy/ says what it does, and runs at its smallest size.

Real engines, trainers and runs. Shell scripts need docker, SLURM or root: their commands are looked up.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hocket import COMMANDS
from support.browser import PATH
from support.processes import FORKS, Command

ROOT = Path(__file__).parents[2]
PYTHON = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/**/*.py")])
PYTHON.remove(ROOT / "examples" / "own_everything" / "test_reward.py")  # tests/extras/test_new.py runs it
SCRIPTS = [path for path in PYTHON if '__name__ == "__main__"' in path.read_text()]
SHELL = sorted([*ROOT.glob("docker/*.sh"), *ROOT.glob("tests/deploy/*.sh")])
ENGINE, WHOLE = [pytest.mark.engine, pytest.mark.long], [pytest.mark.e2e, pytest.mark.long]
SENT = "MiB # seconds # prepare # transfer # compare #"
TINY = "--layers 1 --hidden 64 --rounds 1"
SMOKES = {  # script: (marks, arguments, lines that it prints; #: a positive number, *: anything)
    "clients": (ENGINE, "checkpoints/tiny-sort --only openai --length 512", """openai *: chat.completions: # tokens, *
        openai *: chat.completions, a forced tool: a call of weather(*
        openai *: responses, a stream: # tokens, *"""),
    "curve": (WHOLE, "checkpoints/tiny-sort FOLDER --without-trl --seeds 0 --steps 2 --group 2 --reward random", """
        hocket, seed 0: 2 steps
        | hocket | 1 | * ± * | * ± * | # |
        picture: *"""),
    "fuzz": ([], "--number 12 --seed 11", """200: #, *
        12 requests with seed 11, slowest # s: *
        answers as before: True; 5xx or without an answer: none"""),
    "generate": (ENGINE, "--rounds 1 --prompts 4 --max-tokens 4", """offline: # tokens/s (#..#), # of offline
        engine: # tokens/s *
        /generate: # tokens/s *
        /generate stream: # tokens/s *"""),
    "host": ([], "--ranks 1,2 --tokens 8 --repeats 1", """1 ranks: # s per *: server: encode #, *
        2 ranks: # s per *: server: encode #, *"""),
    "judge": ([], "--number 16", """first run: 16 calls, 0 lost; *
        second run: 0 calls, 0 lost; *"""),
    "lies": (ENGINE, "lies --dtype float32 --kind full --rate 2e-4 --lie one_behind",
        "| one_behind | float32 full 2e-4 | 1 parameters / # log-probs | *"),
    "machines": ([], "--stand-ins SSE --show ^seed|steps: config trainer.steps=3", """SSE:
        steps: 3
        exit status 0, *"""),
    "page": ([pytest.mark.skipif(PATH is None, reason="Chromium is not installed")], "--steps 1000 --rollouts 10",
        """1000 x 10 rollouts, written in *
        first page shows after # s
        second page shows after # s
        another step after # s
        a filter after # s
        a prompt's rollouts after # s
        a part of the curves after # s
        memory of the process that serves it, after 100 more steps: # MiB"""),
    "peer": (WHOLE, f"{TINY} --without-trl --staleness 0 --prompts 2 --shapes 8/4/8 --steps 3",
        """prompt/completion/group 8/4/8
        hocket, k=0 # s a step, generate #, train #, # tokens/s of # a step, * s of processors, # GiB"""),
    "pipeline": (WHOLE, "--staleness 1 trainer.steps=6 rollout.prompts_per_step=2 rollout.group_size=2 "
        "eval.num_prompts=8", """k=1
        steps_per_s #
        trainer_waits *
        after *
        speed-up #"""),
    "rank0": ([], "--rollouts 64 --tokens 4,2000", """2000 tokens: ms per rollout: event loop #, rows #, divide #, *
        {"rollout_s": *, "rollout_token_s": #, "step_token_s": #}"""),
    "rewards": ([], "--number 64", """exact_match: bare #/s, scored #/s, *
        math: bare #/s, scored #/s, *"""),
    "real_model": (WHOLE, "checkpoints/tiny-sort --only look", "look (# s): nothing stands in the way of a run*"),
    "simulate": ([], "predict prompts=4 steps=2", """# steps per hour
        # seconds per step"""),
    "stages": (WHOLE, f"{TINY} --without-trl --shapes 8/4 --pairs 2 --trl-batch 2 --steps 3",
        """dpo 8/4 hocket # s of processors, # s, # of hocket
        rm 8/4 hocket # s of processors, # s, # of hocket"""),
    "routes": (ENGINE, "--rounds 1 --requests 4 --at-once 2 --max-tokens 4", """/v1/completions: 4 requests x 1; *
        /v1/completions, stream: 4 requests *
        /v1/chat/completions: 4 requests *
        /v1/chat/completions, stream: 4 requests *
        /generate: 4 requests *"""),
    "sweep": (WHOLE, "checkpoints/tiny-sort FOLDER --only kl --steps 2 --reward random", """
        kl 0.01, seed 0: begun, 0 wait
        | kl 0.01 | 1 | *"""),
    "sync": (ENGINE, TINY, f"""floor: load #
        collective {SENT} / (broadcast + load) #
        disk {SENT} / (write + read + load) # / (write + read) #
        delta {SENT} of the full bytes #
        adapter {SENT} of the full bytes #
        adapter nccl {SENT} of the full bytes #"""),
    "trainer": (WHOLE, f"{TINY} --only times logprobs --vocabulary 1024 --tokens 64 --longest 32 --micro-batches 1 "
        "--vocabularies 5000 --lengths 512", """hocket: # tokens/s, # s *
        bare: # tokens/s, # s *
        padded: # tokens/s, # s *
        trimmed: # tokens/s, # s *
        a step of hocket (4x) is forward #%, *
        5000 x 512: # | # (#)"""),
}  # fmt: skip
LACKS = ("pytest", "simpy")  # what requirements/dev.txt brings
RUNNER = """import pathlib, runpy, sys
sys.modules.update(dict.fromkeys({lacks}))  # as if they were not installed
sys.argv.pop(0)
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OUTSIDE = {"apt-get", "curl", "docker", "dpkg", "git", "ip", "mount", "nsenter"}  # which a machine may lack
KEYWORDS = {"!", "if", "then", "elif", "else", "fi", "while", "until", "do", "done", "for", "case", "in", "esac"}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables of an environment that lacks what requirements/dev.txt brings."""
    folder = tmp_path_factory.mktemp("lacks")
    for name in LACKS:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})")
    return os.environ | {"PYTHONPATH": str(folder)}


def said_by(script: Path, arguments: str, folder: Path, lacks: Sequence[str] = LACKS) -> str:
    """Return what a script of Python prints before it ends well, without the packages that it lacks."""
    runner = folder / "runner.py"
    runner.write_text(RUNNER.format(lacks=lacks))
    words = [str(script), *arguments.replace("FOLDER", str(folder)).split()]
    with Command(words, folder / "log", program=[str(runner)], **{FORKS: "1"}) as process:
        assert process.wait_end(600) == 0, process.output()[-6000:]
    return process.output()


@pytest.mark.long
@pytest.mark.parametrize("path", [*SCRIPTS, *SHELL], ids=lambda path: path.name)
def test_help_says_what_a_script_does_and_every_option(path: Path, tmp_path: Path) -> None:
    text, is_python = path.read_text(), path.suffix == ".py"
    assert is_python or "sed -n '2," in text  # which prints its head; without that it would start
    if is_python:
        said = said_by(path, "--help", tmp_path)
        about, used = ast.get_docstring(ast.parse(text)) or "", re.findall(r"\boptions\.([a-z]\w+)", text)
        used = [name.replace("_", "-") for name in used]
        assert said.startswith("usage: ")
        assert not re.search(r"^  --\S+(?: \S+)*\n(?! {4})", said, re.M), "an option without a word about it"
    else:
        done = subprocess.run(["bash", path, "--help"], cwd="/", capture_output=True, text=True, timeout=60)
        said = done.stdout
        about = text.split("# ", 1)[1] if text[:2] == "#!" else text.split("\n# ")[1]
        used = re.findall(r"\$\{([A-Z_]+):[-+]", text)
        assert (done.returncode, done.stderr) == (0, "")
    assert about.splitlines()[0] in said
    assert [name for name in used if name not in said] == []


def test_a_python_file_that_is_no_script_is_used_by_another_file() -> None:
    algorithms = set(ROOT.glob("examples/algorithms/*.py"))  # tests/algorithm/test_examples.py uses them
    for path in set(PYTHON) - set(SCRIPTS) - algorithms:
        used = re.compile(rf"from {path.stem} import|{path.name}\]")
        assert any(used.search(other.read_text()) for other in path.parent.iterdir() if other.is_file()), path


RUNS = [
    pytest.param(path, *SMOKES[path.stem][1:], id=path.stem, marks=SMOKES[path.stem][0])
    for path in SCRIPTS  # a KeyError: a new script needs a run, too
    if path.stem != "fake_judge"  # has a test of its own
]


@pytest.mark.long
@pytest.mark.parametrize(("script", "arguments", "lines"), RUNS)
def test_a_script_runs_at_its_smallest_size(script: Path, arguments: str, lines: str, tmp_path: Path) -> None:
    output = said_by(script, arguments, tmp_path, lacks=() if script.stem == "simulate" else LACKS)
    said = [" ".join(line.split()) for line in output.splitlines()]
    for line in map(str.strip, lines.strip().splitlines()):
        pattern = re.escape(line).replace(r"\*", ".*").replace(r"\#", r"([\d.,]+(?:e-\d+)?)")
        found = next(filter(None, (re.fullmatch(pattern, one) for one in said)), None)
        assert found, f"no line {line!r} in\n{output}"
        assert all(float(number.replace(",", "")) > 0 for number in found.groups()), found[0]


def test_a_simulation_says_in_a_sentence_what_it_lacks(quickstart: dict[str, str]) -> None:
    command = [sys.executable, "benchmarks/simulate.py", "predict", "prompts=4", "steps=2"]
    done = subprocess.run(command, cwd=ROOT, env=quickstart, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "a simulation needs simpy: .venv/bin/pip install simpy\n")


def commands(text: str) -> set[str]:
    """Return the words of a shell script that stand where a command begins, near enough."""
    text = re.sub(r"<<-? *'?(\w+)'?(.*\n)(?:.*\n)*?\1\n", r"\2", text)  # here-documents
    text = re.sub(r"(?m)(?:^|(?<=\s))#.*|\\\n", "", text)
    text = re.sub(r"'[^']*'|\$\(\(.*?\)\)|\$\{[^{}]*\}|\[\[.*?\]\]", "Q", text)
    while inner := re.search(r"[$<>]\(([^()]*)\)", text):
        text = text[: inner.start()] + "Q" + text[inner.end() :] + f"\n{inner[1]}\n"
    text = re.sub(r'(?s)"[^"]*"|\w+\+?=\([^)]*\)', "Q", text)
    text = re.sub(r"(?m)(^|\bin\b|;;)\s*[^\s();]+( \| [^\s();]+)*\)(?=\s|$)|\d?[<>]+&?\s*\S+", r"\1;", text)
    found = set()
    for part in re.split(r"[;&|\n(){}]", text):
        words = part.split()
        while words and (words[0] in KEYWORDS or re.match(r"\w+(\[\S+\])?\+?=", words[0])):
            words = [] if words[0] in ("for", "case") else words[1:]
        found |= set(words[:1])
    return {word for word in found if not re.match(r'[Q"$@]', word)}


def test_words_where_a_command_begins_are_found() -> None:
    text = 'a=$(b "c; $(d e)" | f) g && { h; } # i\ncase $x in j | k) [[ l == m ]] || n[1]=2 o ;; esac\np << Q\nr\nQ\n'
    assert commands(text) == set("bdfghop")


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_every_command_of_a_shell_script_is_there(path: Path) -> None:
    text = path.read_text()
    builtins = subprocess.run(["bash", "-c", "compgen -b"], capture_output=True, text=True, check=True).stdout.split()
    sourced = [(ROOT / name).read_text() for name in re.findall(r"(?m)^\. (\S+)", text)]
    known = {*builtins, *re.findall(r"(?m)^(\w+)\(\)", "\n".join([text, *sourced])), *OUTSIDE}
    assert [word for word in commands(text) - known if shutil.which(word) is None] == []
    assert set(re.findall(r"run\.py (\w+)", text)) <= COMMANDS.keys()
    for name in re.findall(r"\b(?:benchmarks|config|docker|examples|src|tests)/[\w/.-]+\w", text):
        assert (ROOT / name).exists(), name
