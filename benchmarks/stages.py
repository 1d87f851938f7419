"""Stages beside TRL: what a step of dpo and of rm takes, on the same model, pairs and precision, in turns.

The model is that of peer.py, with random weights; pairs are random words. A step is an update on `--pairs` pairs, in
micro-batches of `--trl-batch` pairs, in hocket as many tokens; AdamW at 1e-6, float32, no activation checkpointing.
The reference of dpo is the start: TRL runs it in each step by default, and once before training with
precompute_ref_log_probs ("kept"), as hocket does. Its log-probs are no part of a step there.

Prints, for each, seconds of all processors and of the clock for a step, means of those after the first one.
"""

import argparse
import json
import os
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared import parser

if __name__ == "__main__":  # --help does not wait for what follows
    OPTIONS = parser(
        __doc__,
        "section.key=value: further settings of hocket",
        stages=("dpo,rm", "which"),
        shapes=("64/64,256/64", "PROMPT/COMPLETION,...: tokens, about"),
        vary=(False, "completions of 4 tokens to that length"),
        layers=(8, "layers of the model"),
        hidden=(512, "width of the model, a multiple of 64"),
        pairs=(16, "pairs of a step"),
        trl_batch=(8, "pairs of a micro-batch"),
        steps=(4, "steps of each run; the first one does not count"),
        rounds=(1, "runs of each"),
        without_trl=(False, "hocket alone; nothing is installed"),
        told=("", "for its own child process: what is chosen here, as JSON"),
    ).parse_args()

import peer

Ends = list[tuple[float, float]]  # of each step: (seconds of all processors, of the clock)


def make_pairs(file: Path, prompt: int, completion: int, options: argparse.Namespace) -> None:
    draw = random.Random(1)

    def words(number: int) -> str:
        return " ".join("".join(draw.choices(string.ascii_lowercase, k=6)) for _ in range(number))

    def side() -> str:
        most = max(1, completion // peer.WORD_TOKENS)
        return " " + words(draw.randint(1, most) if options.vary else most)

    rows = []
    for _ in range(options.pairs * options.steps):
        asked = words(max(1, prompt // peer.WORD_TOKENS))
        rows.append({"prompt": asked, "chosen": side(), "rejected": side()})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def play_hocket(told: dict[str, Any]) -> Ends:
    from hocket.config import load
    from hocket.extras.stages import driver
    from hocket.observe.run_folder import RunFolder

    ends: Ends = []
    finish = RunFolder.finish

    def noting(self: RunFolder, step: int, *args: Any, **more: Any) -> None:
        finish(self, step, *args, **more)
        ends.append(now())

    RunFolder.finish = noting  # type: ignore[method-assign]
    settings = [
        f"run.dir={told['folder']}/run",
        f"model.path={told['model']}",
        "model.dtype=float32",
        f"data.source={told['rows']}",
        "data.chat_template=false",
        f"{told['stage']}.batch_size={told['pairs']}",
        f"trainer.steps={told['steps']}",
        "trainer.learning_rate=1e-6",
        f"trainer.micro_batch_tokens={2 * told['trl_batch'] * (told['prompt'] + told['completion'] + 8)}",
        "checkpoint.every_steps=0",
        *told["settings"],
    ]
    driver.run(load(None, settings), told["stage"])
    return ends


def play_trl(told: dict[str, Any]) -> Ends:
    import datasets
    import transformers
    import trl

    ends: Ends = []

    class Noting(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now())

    is_dpo = told["stage"] == "dpo"
    settings = (trl.DPOConfig if is_dpo else trl.RewardConfig)(
        output_dir=told["folder"],
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        max_length=None,
        per_device_train_batch_size=told["trl_batch"],
        gradient_accumulation_steps=told["pairs"] // told["trl_batch"],
        max_steps=told["steps"],
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **({"precompute_ref_log_probs": told["kept"]} if is_dpo else {}),
    )
    kind = trl.DPOTrainer if is_dpo else trl.RewardTrainer
    rows = datasets.Dataset.from_json(told["rows"])
    kind(told["model"], args=settings, train_dataset=rows, callbacks=[Noting()]).train()
    return ends


def measured(who: str, told: dict[str, Any], home: Path | None) -> tuple[float, float]:
    """Runs it in a process of its own; returns the seconds of a step: of all processors, and of the clock."""
    with tempfile.TemporaryDirectory() as folder:
        content = json.dumps({**told, "who": who, "folder": folder})
        environment = {
            **os.environ,
            "WANDB_DISABLED": "true",
            "OMP_WAIT_POLICY": "PASSIVE",
            **({"PYTHONPATH": str(home)} if home else {}),
        }
        command = [sys.executable, __file__, "--told", content]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{who} ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
        ends = json.loads(Path(folder, "ends.json").read_text())
    number = len(ends) - 1
    return (ends[-1][0] - ends[0][0]) / number, (ends[-1][1] - ends[0][1]) / number


def compare(model: Path, shape: str, stage: str, options: argparse.Namespace) -> None:
    prompt, completion = map(int, shape.split("/"))
    rows = model / "pairs.jsonl"
    make_pairs(rows, prompt, completion, options)
    told = {**vars(options), "model": str(model), "rows": str(rows), "stage": stage, "kept": False}
    told |= {"prompt": prompt, "completion": completion}
    runs: dict[str, dict[str, Any]] = {"hocket": told}
    if not options.without_trl:
        runs["TRL"] = told
        if stage == "dpo":
            runs["TRL, reference kept"] = told | {"kept": True}
    home = None if options.without_trl else peer.home_of_trl()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, told_one in runs.items():
            found[name].append(measured(name, told_one, None if name == "hocket" else home))
    best = statistics.median(work for work, _ in found["hocket"])
    for name, times in found.items():
        work, clock = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{stage} {shape} {name:20} {work:6.2f} s of processors, {clock:6.2f} s, {work / best:.2f} of hocket")


def main(options: argparse.Namespace) -> None:
    if options.told:
        told = json.loads(options.told)
        ends = (play_hocket if told["who"] == "hocket" else play_trl)(told)
        Path(told["folder"], "ends.json").write_text(json.dumps(ends))
        return
    with tempfile.TemporaryDirectory() as name:
        model = Path(name)
        of_model = {"layers": options.layers, "hidden": options.hidden, "prompt": 256, "mean": 0.0}
        peer.make_model(model, argparse.Namespace(**of_model))
        for stage in options.stages.split(","):
            for shape in options.shapes.split(","):
                compare(model, shape, stage, options)


if __name__ == "__main__":
    main(OPTIONS)
