#!/usr/bin/env python3
"""Examine the CUDA build as far as a machine without a GPU can: install it, import it, and make the engine's arguments.

Where there is no driver, gcc makes a libcuda.so.1 whose functions all fail: vLLM's libraries load it.

    python3 tests/cuda_build.py FOLDER            installs requirements/cuda.lock into FOLDER (9 GB), then checks
    python3 tests/cuda_build.py FOLDER --only imports contract arguments

FOLDER is used again if it has a whole installation. Exit status 1 where a check fails. What needs a GPU to be tried is
listed in docs/explanation/performance.md.
"""

import argparse
import ctypes.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = (  # of other packages, which a run on GPUs imports and one on CPUs does not
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.device_allocator.cumem",
    "vllm.distributed.device_communicators.pynccl",
    "vllm.lora.worker_manager",
    "triton",
    "torch.nn.attention.varlen",
    "torch.distributed._symmetric_memory",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.accelerator.cuda_accelerator",
    "peft",
)
CONTRACT = (  # tests of names and signatures of vLLM, DeepSpeed and torch
    "tests/test_contract.py",
    "tests/server/test_vllm_api.py",
    "tests/server/test_vllm_arguments.py",
    "tests/trainer/test_meta.py",
)
VERSIONS = """
import torch, vllm, deepspeed, transformers
print("torch", torch.__version__, "CUDA", torch.version.cuda, "NCCL", torch.cuda.nccl.version(), "vllm",
      vllm.__version__, "deepspeed", deepspeed.__version__, "transformers", transformers.__version__)
"""
FAKE = """
# vLLM finds no driver here: the platform that it would have on an H100 of 80 GB
import torch, vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability
class H100(NonNvmlCudaPlatform):
    @classmethod
    def get_device_capability(cls, device_id=0): return DeviceCapability(9, 0)
    @classmethod
    def get_device_name(cls, device_id=0): return "NVIDIA H100 80GB HBM3"
    @classmethod
    def get_device_total_memory(cls, device_id=0): return 80 << 30
    @classmethod
    def device_count(cls): return 8
vllm.platforms._current_platform = H100()
torch.cuda.device_count = lambda: 8
"""
ARGUMENTS = (
    FAKE
    + """
import json, sys
from pathlib import Path
from hocket import config
from hocket.server import vllm_arguments
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
assert not vllm_arguments.is_cpu_build()
for path in sys.argv[1:]:
    loaded = config.load(path, ["model.path=checkpoints/tiny-sort", "model.max_length=512", "model.float32_head=false"])
    args = vllm_arguments.engine_arguments(loaded)
    made = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    print(json.dumps({
        "config": path, "device": str(made.device_config.device), "dtype": str(made.model_config.dtype),
        "batched_tokens": made.scheduler_config.max_num_batched_tokens, "sequences": made.scheduler_config.max_num_seqs,
        "tensor_parallel": made.parallel_config.tensor_parallel_size, "lora": made.lora_config is not None,
        "sleep": made.model_config.enable_sleep_mode,
    }))
"""
)


def main() -> int:
    """Run the checks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    checks = {"imports": imports, "contract": contract, "arguments": arguments}
    parser.add_argument("--only", nargs="+", choices=checks, default=list(checks))
    options = parser.parse_args()
    python = install(options.folder.resolve())
    failed = [name for name in options.only if not checks[name](python)]
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return bool(failed)


def install(folder: Path) -> Path:
    """Install the lock into a new environment, unless that was done; return its Python."""
    python, lock = folder / "bin" / "python", ROOT / "requirements" / "cuda.lock"
    done = folder / "installed"
    if not done.exists() or done.read_text() != lock.read_text():
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-I", ROOT / "requirements" / "lock.py", "install", lock], check=True)
        done.write_text(lock.read_text())
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
        print(f"installed {size / 1e9:.1f} GB in {time.monotonic() - start:.0f} s")
    print(run(python, ["-c", VERSIONS]).stdout.strip().splitlines()[-1])
    return python


def stub(folder: Path) -> Path:
    """Make a libcuda.so.1 with the names that vLLM's libraries look up; return its folder."""
    place = folder / "driver"
    place.mkdir(exist_ok=True)
    names = set()
    for library in folder.glob("lib/python*/site-packages/vllm/**/*.so"):
        listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        names.update(re.findall(r"\bcu[A-Z]\w+", listed.stdout))
    source = "".join(f"int {name}(void) {{ return 999; }}\n" for name in sorted(names))
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", place / "libcuda.so.1", "-x", "c", "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return place


def run(python: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the environment's Python with hocket's source."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "HOCKET_EXEC_PID")}
    if ctypes.util.find_library("cuda") is None:
        env["LD_LIBRARY_PATH"] = str(stub(python.parents[1]))
    env |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "HOCKET_DEVICE": "cuda", "DS_ACCELERATOR": "cuda"}
    return subprocess.run(
        [python, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800, check=False
    )


def imports(python: Path) -> bool:
    """Import every module of hocket, and those of others that GPUs need; each in a list, in one process."""
    files = [path.relative_to(ROOT / "src").with_suffix("") for path in ROOT.glob("src/hocket/**/*.py")]
    ours = [".".join(path.parts).removesuffix(".__init__") for path in sorted(files) if path.name != "__main__"]
    code = """
import importlib, json, sys
failed = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""
    names = [*ours, *MODULES]
    result = run(python, ["-c", code, json.dumps(names)])
    if result.returncode:
        print(f"imports: broke off: {result.stderr[-1500:]}")
        return False
    failed = json.loads(result.stdout.splitlines()[-1])
    print(f"imports: {len(names) - len(failed)} of {len(names)} modules: {len(ours)} of hocket, the others of packages")
    for name, error in failed.items():
        print(f"  {name}: {error}")
    return not failed


def contract(python: Path) -> bool:
    """Run the tests of the engines' names against this build."""
    files = [name for name in CONTRACT if (ROOT / name).exists()]
    words = [
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu and not engine and not e2e and not ranks",
        *files,
    ]
    result = run(python, words)
    lines = result.stdout.strip().splitlines()
    print(f"contract: {lines[-1] if lines else result.stderr[-1500:]}")
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"  {line[:200]}")
    return result.returncode == 0


def arguments(python: Path) -> bool:
    """Make vLLM's configuration of each config for GPUs, as on a GPU that is not there."""
    found = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("config/**/*.yaml"))]
    paths = [path for path in found if re.search("gpu|gb|multi_node", path)]
    result = run(python, ["-c", ARGUMENTS, *paths])
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        print(f"arguments: {line}")
    if len(lines) < len(paths):
        print(f"arguments: {len(lines)} of {len(paths)}: {result.stderr[-1500:]}")
    return len(lines) == len(paths)


if __name__ == "__main__":
    sys.exit(main())
