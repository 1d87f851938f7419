"""Keep the files under `plugins` in the run folder: config.yaml names functions, these say what they are."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hocket.common.files import write_atomically
from hocket.common.registry import Plugin
from hocket.observe.rows import read_text, reading

FILE = "plugins.json"
FOLDER = "plugins"


def keep(run_dir: Path, plugins: Sequence[Plugin]) -> list[str]:
    """Write plugins.json and a copy of each file; return a sentence for each that has changed."""
    before = {row["path"]: row for row in kept(run_dir)}
    rows = []
    changes = []
    for plugin in plugins:
        copy = f"{FOLDER}/{Path(plugin.path).stem}-{plugin.sha256[:8]}.py"
        (run_dir / FOLDER).mkdir(exist_ok=True)
        write_atomically(run_dir / copy, plugin.text)
        registers = list(plugin.registers)
        rows.append({"path": plugin.path, "sha256": plugin.sha256, "registers": registers, "copy": copy})
        old = before.get(plugin.path, rows[-1])
        if old["sha256"] != plugin.sha256:
            hashes = f"was {old['sha256'][:8]} and is {plugin.sha256[:8]}"
            changes.append(f"plugin {plugin.path} {hashes}; the one before: {run_dir / old['copy']}")
    if rows != list(before.values()):
        write_atomically(run_dir / FILE, json.dumps(rows, indent=1) + "\n")
    return changes


def kept(run_dir: Path) -> list[dict[str, Any]]:
    with reading(run_dir / FILE):
        rows = json.loads(read_text(run_dir / FILE) or "[]")
        return [{key: row[key] for key in ("path", "sha256", "registers", "copy")} for row in rows]


def texts(run_dir: Path) -> list[dict[str, Any]]:
    return [{**row, "text": (run_dir / row["copy"]).read_text(encoding="utf-8")} for row in kept(run_dir)]
