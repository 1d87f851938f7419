"""The page of a long run: seconds until it shows, a step change and a filter; memory of the process that serves it.

Writes a run of --steps steps with --rollouts rollouts each (1.3 GB for the default million), starts `run.py watch` and
drives Chromium. Prints a line per figure. With --pictures FOLDER it takes pictures of a run folder instead: those of
the README, of a quickstart with observe.tokens=true, by
`benchmarks/page.py --run runs/quickstart --pictures docs/images`.
"""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from PIL import Image
from shared import ROOT, parser

if __name__ == "__main__":
    OPTIONS = parser(
        __doc__,
        steps=(10_000, "steps of the run"),
        rollouts=(100, "rollouts of a step"),
        run=("", "its folder, written if it is missing; default: a temporary one"),
        pictures=("", "folder for pictures of the page"),
    ).parse_args()

from support.browser import Browser, browser

METRICS = ("reward/mean", "reward/std", "rollout/length_mean", "train/entropy", "train/logprob_gap", "train/grad_norm",
           "train/loss", "step/tokens_per_s", "train/mfu", "rollout/tokens", "time/generate", "time/train",
           "time/sync", "time/step")  # fmt: skip
NUM_OTHERS = 50  # further metrics of a step
ROW = {"answer": "42", "meta": {}, "parts": {"correct": 1.0, "format": 0.5}, "error": None, "note": "",
       "num_tokens": 60, "completion": "Seventeen and twenty-five make forty-two. " * 6, "mask": [0] * 20 + [1] * 60,
       "finish_reason": "stop", "turns": 1, "token_ids": [*range(80)], "logprobs": [-0.25] * 80}  # fmt: skip
SHOWN = "document.querySelectorAll('svg path').length > 8 && document.querySelectorAll('.prompt').length > 0"


def write_run(folder: Path, steps: int, rollouts: int) -> None:
    """Write metrics, phases and rollouts of a run as it would be after `steps` steps."""
    draw = random.Random(0)
    rest = json.dumps(ROW)[1:]
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"trainer: {{steps: {steps}}}\n")
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "timeline.jsonl").open("w") as timeline:
        for step in range(1, steps + 1):
            values = {name: abs(math.sin(step / 900)) + draw.random() / 5 for name in METRICS}
            values |= {f"other/{number}": draw.random() for number in range(NUM_OTHERS)}
            metrics.write(json.dumps({"step": step, **values}) + "\n")
            for number, name in enumerate(("generate", "wait", "reward", "train", "sync")):
                where = {"step": step, "name": name, "who": "trainer" if number else "servers"}
                start = step + number / 5
                timeline.write(json.dumps({**where, "start": start, "end": start + 0.2}) + "\n")
            lines = []
            for number in range(rollouts):
                group = f"step {step}/{number // 10}"
                head = {"id": f"{group}/{number % 10}", "group_id": group, "prompt": f"{step} and {number // 10}?"}
                lines.append(f"{json.dumps({**head, 'reward': draw.random()})[:-1]}, {rest}\n")
            (folder / f"rollouts/step_{step:06d}.jsonl").write_text("".join(lines))


@contextmanager
def watching(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Serve a folder's page; yield its URL and process."""
    command = [sys.executable, str(ROOT / "run.py"), "watch", str(folder), "--port", "8099"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def timed(tab: Browser, action: str, done: str) -> float:
    """Return the seconds from an action in the page until an expression is true there, and painted."""
    script = f"""new Promise(resolve => {{
        const start = performance.now();
        {action};
        const look = () => {{ if ({done}) resolve(performance.now() - start); else requestAnimationFrame(look); }};
        requestAnimationFrame(look);
    }})"""
    return float(tab.run(script)) / 1000


def typed(selector: str, value: object) -> str:
    """Return a script that puts a value into an input."""
    fire = "".join(f"one.dispatchEvent(new Event('{name}'));" for name in ("input", "change"))
    return f"(one => {{ one.value = '{value}'; {fire} }})(document.querySelector(\"{selector}\"))"


def measure(folder: Path, steps: int) -> None:
    with watching(folder) as (url, process), browser() as tab:
        for page in ("first", "second"):
            start = time.perf_counter()
            tab.open(url)
            tab.wait(SHOWN)
            print(f"{page} page shows after {time.perf_counter() - start:.2f} s")
        step = "input[type=number]"
        middle = steps // 2
        shown = f"document.querySelector('.prompt').innerText.startsWith('{middle} and')"
        print(f"another step after {timed(tab, typed(step, middle), shown):.3f} s")
        few = "document.querySelectorAll('.prompt').length == 1"
        print(f"a filter after {timed(tab, typed('input[type=search]', 'and 0'), few):.3f} s")
        articles = "document.querySelectorAll('article').length == 10"
        opened = timed(tab, "document.querySelector('.prompt').click()", articles)
        print(f"a prompt's rollouts after {opened:.3f} s")
        zoomed = timed(tab, f"zoom([{middle}, {middle + 200}])", "true")
        print(f"a part of the curves after {zoomed:.3f} s")
        for number in range(1, 101):
            timed(tab, typed(step, number), f"document.querySelector('.prompt')?.innerText.startsWith('{number} and')")
        print(f"memory of the process that serves it, after 100 more steps: {process.memory_info().rss >> 20} MiB")


def take_pictures(run: Path, folder: Path) -> None:
    """Write page.png, of the curves, and rollouts.png, of a prompt's rollouts with tokens by their gap."""
    with watching(run) as (url, _), browser() as tab:
        tab.open(url, width=1080, height=640)
        tab.wait(SHOWN)
        save(tab, folder / "page.png")
        before = json.dumps(tab.run("document.querySelector('.prompt').innerText"))
        tab.type("input[type=number]", "20")
        differ = "[...document.querySelectorAll('.prompt')].find(one => /[.]/.test(one.innerText))"
        tab.wait(f"document.querySelector('.prompt').innerText != {before}")
        tab.run(f"{differ}.click()")
        tab.wait("document.querySelectorAll('article').length > 0")
        tab.type("select[aria-label='colour of the tokens']", "gap")
        tab.wait("[...document.querySelectorAll('article')].every(one => one.querySelector('.tokens'))")
        tab.run("document.querySelector('h3 ~ .side').previousElementSibling.scrollIntoView()")
        tab.run("scrollBy(0, -160)")
        save(tab, folder / "rollouts.png")


def save(tab: Browser, path: Path) -> None:
    """Write a small picture of the tab."""
    tab.picture(path)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        run = Path(OPTIONS.run or f"{made}/run")
        if OPTIONS.pictures:
            take_pictures(run, Path(OPTIONS.pictures))
            return
        if not run.exists():
            start = time.perf_counter()
            write_run(run, OPTIONS.steps, OPTIONS.rollouts)
            print(f"{OPTIONS.steps} x {OPTIONS.rollouts} rollouts, written in {time.perf_counter() - start:.0f} s")
        measure(run, OPTIONS.steps)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
