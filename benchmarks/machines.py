"""A command of run.py as other machines would compute it: older instructions, one thread or two.

Sums of float32 come out a little differently with wider vectors, more threads or another library, and a run that
samples follows the difference. Each stand-in makes this machine's libraries use older instructions; then the command
runs, and the lines of its output that match --show are printed with its exit status and seconds. Learning runs say more
with more seeds: each of --seeds runs the command with trainer.seed=N.

    benchmarks/machines.py --seeds 0,1,2 quickstart
    benchmarks/machines.py --seeds 0,1,2 quickstart examples/own_everything/config.yaml
    benchmarks/machines.py --show "passed|failed|FAILED" test
"""

import os
import re
import subprocess
import sys
import tempfile
import time

from shared import ROOT, numbers

STAND_INS: dict[str, dict[str, str]] = {
    "as it is": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "AVX2 and one thread": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "1"},
}


def run(words: list[str], variables: dict[str, str], show: str) -> int:
    """Runs the command and prints what it is asked to show; returns its exit status."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "run.py", *words],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = done.stdout.splitlines()
    lines = [line for line in said if re.search(show, line)] or said[-5:]  # which say why there are none
    print("\n".join([*lines, f"exit status {done.returncode}, {time.monotonic() - begun:.0f} s"]), flush=True)
    return done.returncode


def main(words: list[str], stand_ins: list[str], seeds: list[int], show: str) -> int:
    failed = 0
    for name in stand_ins:
        if not seeds:
            print(f"{name}:", flush=True)
            failed += run(words, STAND_INS[name], show) != 0
        for seed in seeds:
            print(f"{name}, seed {seed}:", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                settings = [f"trainer.seed={seed}", f"run.dir={folder}/run"]
                failed += run([*words, *settings], STAND_INS[name], show) != 0
    return int(failed > 0)


if __name__ == "__main__":
    import argparse

    PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    PARSER.add_argument("--stand-ins", default=",".join(STAND_INS), help="which, with commas between (default: all)")
    PARSER.add_argument(
        "--seeds", type=numbers, default=[], metavar="N,N", help="trainer.seed of one run after another"
    )
    PARSER.add_argument("--show", default=r"^held-out accuracy", help="lines of the output to print: an expression")
    PARSER.add_argument("words", nargs=argparse.REMAINDER, help="the command and its arguments")
    OPTIONS = PARSER.parse_args()
    sys.exit(main(OPTIONS.words, OPTIONS.stand_ins.split(","), OPTIONS.seeds, OPTIONS.show))
