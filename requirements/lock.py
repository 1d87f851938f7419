#!/usr/bin/env python3
"""Install a lock, or renew both. A lock lists each package of a build with its version and the hashes of its files.

    python requirements/lock.py install FILE        into the interpreter that runs this, by uv, which pip installs first
    .venv/bin/python requirements/lock.py renew     after a change of requirements.txt, cpu.txt or dev.txt
    .venv/bin/python requirements/lock.py renew --upgrade | --upgrade-package NAME          to newer versions

uv looks where pip is set to look: its indexes, its folders of wheels, its certificates. Standard library only.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LISTS = {"cpu": FOLDER / "cpu.txt", "cuda": FOLDER.parent / "requirements.txt"}
UV = Path(sysconfig.get_path("scripts"), "uv")
PIP = [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check"]
INSTALL = ["install", "--no-deps", "--require-hashes", "-r"]
HEAD = "# All packages of a build. Written by `.venv/bin/python requirements/lock.py renew`.\n"


def install(lock: Path) -> None:
    """Become uv, which installs the lock."""
    options = uv_options(lock.read_text("utf-8"))
    # compiled now, or every process compiles its imports where Python may not write what it has compiled
    command = [UV, "pip", *INSTALL, lock, *options, "--compile-bytecode"]
    os.execv(UV, list(map(str, command)))


def uv_options(requirements: str) -> list[str]:
    """Install uv; return its options to look where pip looks, and at PyTorch for torch without CUDA if pip has none."""
    if subprocess.run([*PIP, *INSTALL, FOLDER / "installer.lock", "--no-user", "--quiet"], close_fds=False).returncode:
        sys.exit(1)  # pip has said why
    listed = subprocess.run([*PIP, "config", "list"], check=True, stdout=subprocess.PIPE, text=True).stdout
    pips = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):  # a variable wins over a file
        name, _, value = line.partition("=")
        pips[name.rpartition(".")[2]] = ast.literal_eval(value)
    names = ("index-url", "extra-index-url", "find-links", "trusted-host", "cert")  # uv has the same
    options = [f"--{name}={place}" for name in names for place in pips.get(name, "").split()]
    options += [f"--python={sys.executable}", f"--project={FOLDER.parent}", "--index-strategy=unsafe-best-match"]
    for torch in re.findall(r"(?m)^torch==[\d.]+\+cpu", requirements):
        ask = [UV, "pip", "install", torch, "--no-deps", "--dry-run", "--reinstall", *options]
        if subprocess.run(ask, stderr=subprocess.DEVNULL).returncode:
            options.append("--torch-backend=cpu")
    return options


def renew(options: list[str]) -> None:
    """Write the locks, in the sections of the lists: an image leaves out what only the other process needs."""
    for build, path in LISTS.items():
        texts = re.split(r"(?m)^# The .* alone.*$", path.read_text("utf-8"))
        both, trainer, server, development = *texts, (FOLDER / "dev.txt").read_text("utf-8")
        # not from extra indexes: one that mirrors a part of the files would give a part of the hashes
        places = [option for option in uv_options(both) if not option.startswith("--extra-index-url")]
        lock = FOLDER / f"{build}.lock"
        compile_(FOLDER / "installer.lock", "uv", *places, *options)
        whole = compile_(lock, both + trainer + server + development, *places, *options)
        with tempfile.TemporaryDirectory() as folder:
            versions = shutil.copy(lock, folder)  # which uv prefers
            trains = compile_(Path(versions), both + trainer, *places).keys()
            shutil.copy(lock, folder)
            serves = compile_(Path(versions), both + server, *places).keys()
        if build == "cuda":
            whole["torch"] = whole["torch"].replace("==", "===")  # 2.13.0+cpu, too, is ==2.13.0
        sections = {
            "# Both processes": trains & serves,
            "# The trainer alone": trains - serves,
            "# The server alone": serves - trains,
            "# Development alone": whole.keys() - trains - serves,
        }
        parts = [f"{title}\n" + "".join(whole[name] for name in sorted(names)) for title, names in sections.items()]
        lock.write_text("\n".join([HEAD, *parts]), "utf-8")


def compile_(lock: Path, text: str, *options: str) -> dict[str, str]:
    """Write requirements and all that they need, with hashes, for all machines and Pythons; return lines by name.

    uv keeps the versions that the file has. A package may have several, each for other Pythons.
    """
    wanted = ["--universal", "--python-version=3.11", "--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
    command = [str(UV), "pip", "compile", "-", "--output-file", str(lock), *wanted, *options]
    subprocess.run(command, input=text, stdout=subprocess.DEVNULL, check=True, text=True)
    found: dict[str, str] = {}
    for block in re.findall(r"(?m)^\w.*\n(?: .*\n)*", lock.read_text("utf-8")):
        name = block.partition("==")[0]
        found[name] = found.get(name, "") + block
    return found


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["install", file]:
            install(Path(file))
        case ["renew", *options]:
            renew(options)
        case _:
            sys.exit(__doc__)
