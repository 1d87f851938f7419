"""Programs that a test writes, and code that it runs in an interpreter of its own."""

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def write_program(path: Path, text: str) -> None:
    """Writes what the operating system runs."""
    path.write_text(text)
    path.chmod(0o755)


def run_code(code: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs Python code that finds hocket; returns its status and what it wrote."""
    there = os.environ | {"PYTHONPATH": str(SOURCE)} | variables
    return subprocess.run([sys.executable, "-c", code], env=there, capture_output=True, text=True, timeout=600)
