"""Build the page of runs: page.html, whose one script draws their data, in a report's file or from a server.

Model output is hostile text. The JSON has no "<", the script makes only text nodes of it, and the page's policy allows
only that script, by its hash, and no resource from outside.
"""

import base64
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hocket.common.files import write_atomically
from hocket.config.sections import leaves
from hocket.observe import browse
from hocket.observe.metrics import METRICS as TABLE
from hocket.observe.metrics import PHASES
from hocket.observe.reader import RunReader
from hocket.observe.rows import read_text, reading

NUM_SAMPLES = 24  # steps of which a report has rollouts
MAX_TOKENS = 20_000  # of them with tokens
MAX_ROWS = 128  # of the newest step
_TEMPLATE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def policy(connect: str = "'none'") -> str:
    """Return the page's content security policy."""
    script = _TEMPLATE.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src {connect}"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def html(data: Mapping[str, Any] | None, connect: str = "'none'") -> str:
    """Return the page of some data; without, it asks its server for them."""
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return _TEMPLATE.replace("POLICY", policy(connect)).replace("PAGE_DATA", text)


def data_of(runs: Sequence[RunReader]) -> dict[str, Any]:
    """Return what a page shows of runs at first."""
    return {
        "runs": [run.data() for run in runs],
        "differing": _differing([run.folder for run in runs]),
        "meanings": {metric.name: metric.meaning for metric in TABLE},
        "phases": PHASES,
    }


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Write a file with all that runs have shown, over one another."""
    runs = [RunReader(folder) for folder in folders]
    with reading(", ".join(map(str, folders))):
        for run in runs:
            run.look()
        data = data_of(runs)
        parts = zip(folders, data["runs"], strict=True)
        data["runs"] = [one | _embedded(folder, one["rollouts"]) for folder, one in parts]
    write_atomically(path, html(data))


def _differing(folders: Sequence[Path]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ, with each one's value."""
    settings = [leaves(yaml.safe_load(read_text(folder / "config.yaml")) or {}) for folder in folders]
    keys = dict.fromkeys(itertools.chain(*settings))
    rows = [(key, [str(of_run.get(key)) for of_run in settings]) for key in keys]
    return [row for row in rows if len(set(row[1])) > 1]


def _embedded(folder: Path, rollouts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return rollouts for a page without a server: the newest step's, and evenly of earlier ones the most telling."""
    steps = rollouts["step"][:: -max(1, math.ceil(len(rollouts["step"]) / NUM_SAMPLES))]
    rows = {f"step_{step:06d}": browse.in_short(folder, f"step_{step:06d}") for step in steps}
    tokens: dict[str, Any] = {}
    left = MAX_TOKENS
    for place, (name, found) in enumerate(rows.items()):
        telling = browse.most_telling(found)
        left -= sum(row["num_tokens"] for row in telling)
        if telling and left > 0:
            of_group = browse.tokens(folder, name, telling[0]["group_id"])
            tokens |= {f"{name} {id}": told for id, told in of_group.items()}
        rows[name] = telling if place else found[:MAX_ROWS]
    return {"rows": rows, "tokens": tokens, "rollouts": {"step": steps[::-1], "eval": []}}
