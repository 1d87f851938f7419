"""How hocket and TRL learn beside each other: the same model, rows, order of prompts, seeds, lengths and loss.

Both train MODEL on sums of two numbers of two digits (config/sums.py): full fine-tuning in float32, 8 prompts a step,
each as often as `--group` says, completions of 12 tokens, the loss of Dr. GRPO with clip 0.2, advantages that are not
divided, no KL, one update a step, AdamW with a constant rate, gradients clipped to 1. Prompts come in the order in
which hocket draws them. hocket generates with vLLM, TRL with transformers, as it does by default; TRL is installed into
a folder of its own (benchmarks/peer.py). TRL's loss is an average over all completions, hocket's over those of groups
that have a signal: with `--like-trl` hocket is trained a second time, with an average over all completions. Held-out
rows are answered greedily every `--every` steps, each by the library's own engine.

A run is a line of OUTPUT/curve.jsonl as soon as it ends; the same command continues what was interrupted. At the end
it writes the picture OUTPUT/curve.svg, of which docs/images/curve.svg is a copy, and a table of accuracies and seconds
(without the held-out evaluations).

    benchmarks/curve.py MODEL OUTPUT --seeds 0,1,2
"""

import functools
import itertools
import json
import math
import random
import shutil
import signal
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shared import ROOT, parser

from hocket.common.registry import load_plugin
from hocket.observe.rows import read_lines, read_metrics, step_of
from support.processes import Process, free_port

PROMPTS, TOKENS, HELD_OUT = 8, 12, 200
SUMS = f"{ROOT}/config/sums.py"
MICRO_BATCH = 16  # completions of a forward pass of TRL, as in benchmarks/peer.py
LIKE_TRL = "hocket, average as TRL's"
COLOURS = {"hocket": "#0b6e99", "TRL": "#c2571a", LIKE_TRL: "#5b8c2a"}
AGGREGATE = """# Divides by all completions of a step, also those of groups with equal rewards.
from hocket.algorithm.choices import aggregate


@aggregate("all_completions")
def all_completions(mask_bt, longest, completions: int = 1):
    return mask_bt / (completions * longest)
"""
Line = dict[str, Any]  # who, seed, rewards and seconds by step, greedy by step


def write_rows(folder: Path, seed: int, number: int) -> None:
    """Write the held-out rows, and `number` rows in the order in which a run with this seed draws them."""
    from hocket.data.curriculum import Shuffle
    from hocket.data.stream import PromptStream
    from hocket.types import Prompt, Prompts

    sums = load_plugin(SUMS).sums
    rows = list(itertools.islice(sums("train", 0), number))
    prompts = Prompts(Prompt(id=str(index), token_ids=array("I", (1,))) for index in range(number))
    drawn = PromptStream(prompts, Shuffle(), seed=seed).take(number)
    write_lines(folder / "train.jsonl", rows)
    write_lines(folder / "drawn.jsonl", [rows[int(prompt.id)] for prompt in drawn.values()])
    write_lines(folder / "test.jsonl", list(itertools.islice(sums("test", 0), HELD_OUT)))


def write_lines(file: Path, rows: Sequence[Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def hocket(folder: Path, options: Any, seed: int, like_trl: bool = False) -> Line:
    """Train with hocket's quickstart."""
    settings = {
        "run.dir": folder / "run",
        "plugins": f"[{SUMS}]",
        "model.path": options.model,
        "model.max_length": 128,
        "model.dtype": "float32",
        "data.source": folder / "train.jsonl",
        "eval.data.source": folder / "test.jsonl",
        "eval.num_prompts": HELD_OUT,
        "eval.temperature": 0,
        "eval.every_steps": options.every,
        "eval.reward": "last_number",
        "rewards.functions": f"{{{options.reward}: 1}}",
        "rollout.prompts_per_step": PROMPTS,
        "rollout.group_size": options.group,
        "rollout.max_tokens": TOKENS,
        "algorithm.preset": "dr_grpo",
        "trainer.seed": seed,
        "trainer.steps": options.steps,
        "trainer.learning_rate": options.rate,
        "trainer.schedule": "constant",
        "trainer.warmup_steps": 0,
        "server.port": free_port(),
        "checkpoint.every_steps": 0,
    }
    if like_trl:
        (folder / "aggregate.py").write_text(AGGREGATE)
        settings["plugins"] = f"[{SUMS}, {folder}/aggregate.py]"
        completions = PROMPTS * options.group
        settings["algorithm.aggregate"] = f"{{name: all_completions, completions: {completions}}}"
    run_to_end(["quickstart", *(f"{key}={value}" for key, value in settings.items())], folder / "log")
    shutil.rmtree(folder / "run" / "weights", ignore_errors=True)
    rows: list[dict[str, Any]] = list(read_metrics(folder / "run"))
    steps = [row for row in rows if step_of(row) > 0]
    greedy = {str(row["step"]): row["eval/greedy"] for row in rows if "eval/greedy" in row}
    seconds = [row["time/step"] - row.get("time/eval", 0.0) for row in steps]
    return {"rewards": [row["reward/mean"] for row in steps], "greedy": greedy, "seconds": seconds}


def trl(folder: Path, options: Any, seed: int) -> Line:
    """Train with TRL."""
    from peer import home_of_trl

    chosen = {"model": str(options.model), "folder": str(folder), "seed": seed, "rate": options.rate}
    chosen |= {"group": options.group, "steps": options.steps, "every": options.every, "reward": options.reward}
    own = {"program": [__file__], "PYTHONPATH": str(home_of_trl()), "WANDB_DISABLED": "true"}
    # The parser wants both positional arguments, which this process does not read.
    command = [str(options.model), str(folder), "--as-trl", json.dumps(chosen)]
    run_to_end(command, folder / "log", **own)
    return dict(json.loads((folder / "figures.json").read_text()))


def run_to_end(command: Sequence[str], log: Path, **process: Any) -> None:
    with Process(command, log, **process) as child:
        while child.popen.poll() is None:
            time.sleep(0.5)
        if status := child.popen.poll():
            sys.exit(f"{' '.join(command)}\nended with {status}:\n{child.output()[-3000:]}")


def play_trl(chosen: dict[str, Any]) -> None:
    """Train with TRL in this process, and write its figures."""
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    folder = Path(chosen["folder"])
    right = load_plugin(SUMS).last_number
    figures: Line = {"rewards": [], "greedy": {}, "seconds": []}

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        scores = [right(text, wanted) for text, wanted in zip(texts, answer, strict=True)]
        if chosen["reward"] == "random":
            scores = [float(random.getrandbits(1)) for _ in texts]
        figures["rewards"].append(sum(scores) / len(scores))
        return scores

    class Watch(TrainerCallback):  # type: ignore[misc]  # TRL is not there
        """Evaluates every few steps, and takes the time of the steps alone."""

        begun = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            figures["greedy"]["0"] = greedy_of(trainer, read_lines(folder / "test.jsonl"), right)
            self.begun = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            figures["seconds"].append(time.perf_counter() - self.begun)
            if state.global_step % chosen["every"] == 0 or state.global_step == chosen["steps"]:
                accuracy = greedy_of(trainer, read_lines(folder / "test.jsonl"), right)
                figures["greedy"][str(state.global_step)] = accuracy
            self.begun = time.perf_counter()

    rows = read_lines(folder / "drawn.jsonl")
    chats = [{"prompt": chat_of(row), "answer": row["answer"]} for row in rows]
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        seed=chosen["seed"],
        shuffle_dataset=False,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=PROMPTS * chosen["group"] // MICRO_BATCH,
        num_generations=chosen["group"],
        max_completion_length=TOKENS,
        max_steps=chosen["steps"],
        learning_rate=chosen["rate"],
        lr_scheduler_type="constant",
        beta=0.0,
        epsilon=0.2,
        loss_type="dr_grpo",
        scale_rewards=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = datasets.Dataset.from_list(chats)
    trainer = GRPOTrainer(chosen["model"], reward, settings, train_dataset=data, callbacks=[Watch()])
    trainer.train()
    (folder / "figures.json").write_text(json.dumps(figures))


def chat_of(row: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}]


def greedy_of(trainer: Any, rows: Sequence[dict[str, Any]], right: Callable[[str, str], float]) -> float:
    """Measure the share of rows that the model of TRL's trainer answers right at temperature 0."""
    import torch

    tokenizer, model = trainer.processing_class, trainer.model
    tokenizer.padding_side = "left"
    chats = [chat_of(row) for row in rows]
    ids = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    model.eval()
    with torch.no_grad():
        generated = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False)
    model.train()
    texts = tokenizer.batch_decode(generated[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    scores = [right(text, row["answer"]) for text, row in zip(texts, rows, strict=True)]
    return sum(scores) / len(scores)


# The picture

WIDTH, HEIGHT, LEFT, TOP = 380, 240, 50, 50  # of a panel's axes, and the room around them


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Compute a mean over seeds and its standard error, 0 for a single seed."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def points(lines: Sequence[Line], who: str, what: str) -> list[tuple[int, float, float]]:
    """List step, mean over seeds and standard error, of the rewards or of the greedy accuracy."""
    by_step: dict[int, list[float]] = {}
    for line in lines:
        if line["who"] != who:
            continue
        values = line["greedy"]
        if what == "rewards":
            values = dict(enumerate(line["rewards"], start=1))
        for step, value in values.items():
            by_step.setdefault(int(step), []).append(value)
    return [(step, *mean_and_error(by_step[step])) for step in sorted(by_step)]


def panel(lines: Sequence[Line], title: str, what: str, left: int, last: int) -> list[str]:
    """Draw the axes of one quantity from 0 to 1 over the steps, and a line with its band for each library."""

    def x(step: float) -> float:
        return round(left + step / last * WIDTH, 1)

    def y(value: float) -> float:
        return round(TOP + (1 - value) * HEIGHT, 1)

    drawn = [f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{title}</text>']
    for tick in (0, 0.25, 0.5, 0.75, 1):
        drawn.append(f'<path d="M{left} {y(tick)} h{WIDTH}" stroke="#ddd"/>')
        drawn.append(f'<text x="{left - 8}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>')
    below = TOP + HEIGHT + 18
    ticks = range(0, last + 1, max(1, last // 4))
    drawn += [f'<text x="{x(step)}" y="{below}" text-anchor="middle">{step}</text>' for step in ticks]
    for who, colour in COLOURS.items():
        curve = points(lines, who, what)
        if not curve:
            continue
        upper = [f"{x(step)},{y(mean + error)}" for step, mean, error in curve]
        lower = [f"{x(step)},{y(mean - error)}" for step, mean, error in reversed(curve)]
        drawn.append(f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" fill-opacity="0.2"/>')
        middle = " ".join(f"{x(step)},{y(mean)}" for step, mean, _ in curve)
        drawn.append(f'<polyline points="{middle}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return drawn


def picture(lines: Sequence[Line]) -> str:
    """Draw reward and held-out accuracy of both libraries as SVG; bands are a standard error over seeds."""
    last = max(len(line["rewards"]) for line in lines)
    right = 2 * LEFT + WIDTH
    width, height = right + WIDTH + 20, TOP + HEIGHT + 60
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>'
    ]
    drawn += panel(lines, "Mean reward of a step", "rewards", LEFT, last)
    drawn += panel(lines, "Held-out accuracy, greedy", "greedy", right, last)
    left = LEFT
    for who, colour in COLOURS.items():
        seconds, seeds = median_seconds(lines, who)
        if seeds:
            label = f"{who}: {seconds:.1f} s a step, {seeds} seeds"
            drawn.append(f'<text x="{left}" y="{height - 14}" fill="{colour}" font-weight="bold">{label}</text>')
            left += width // len(COLOURS)
    return "\n".join([*drawn, "</svg>", ""])


def median_seconds(lines: Sequence[Line], who: str) -> tuple[float, int]:
    """Compute the median seconds of a step but the first of each run; return it and the number of runs."""
    seeds = [line for line in lines if line["who"] == who]
    seconds = sorted(itertools.chain(*(line["seconds"][1:] for line in seeds)))
    return (seconds[len(seconds) // 2] if seconds else math.nan), len(seeds)


def table(lines: Sequence[Line]) -> str:
    """Write accuracies and seconds as Markdown."""
    steps = [step for step, *_ in points(lines, lines[0]["who"], "greedy")]
    rows = [f"| held-out greedy | seeds | {' | '.join(f'step {step}' for step in steps)} | s a step |"]
    rows.append(f"|---|--:|{'--:|' * len(steps)}--:|")
    for who in COLOURS:
        cells = [f"{mean:.3f} ± {error:.3f}" for _, mean, error in points(lines, who, "greedy")]
        seconds, seeds = median_seconds(lines, who)
        if seeds:
            rows.append(f"| {who} | {seeds} | {' | '.join(cells)} | {seconds:.1f} |")
    return "\n".join(rows)


def main(options: Any) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what runs, too
    options.model, output = options.model.resolve(), options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    file = output / "curve.jsonl"
    done = {(line["who"], line["seed"]) for line in read_lines(file)}
    kinds: dict[str, Callable[[Path, Any, int], Line]] = {"hocket": hocket}
    if not options.without_trl:
        kinds["TRL"] = trl
    if options.like_trl:
        kinds[LIKE_TRL] = functools.partial(hocket, like_trl=True)
    for seed, (who, train) in itertools.product(options.seeds, kinds.items()):
        if (who, seed) in done:
            continue
        folder = output / f"run-{list(COLOURS).index(who)}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_rows(folder, seed, options.steps * PROMPTS)
        print(f"{who}, seed {seed}: {options.steps} steps", flush=True)
        line = {"who": who, "seed": seed} | train(folder, options, seed)
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    finished = read_lines(file)
    (output / "curve.svg").write_text(picture(finished))
    print(table(finished))
    print(f"picture: {output}/curve.svg")


if __name__ == "__main__":
    arguments = parser(
        __doc__,
        seeds=([0, 1, 2], "seeds of each library"),
        steps=(40, "steps of each run"),
        every=(10, "steps between held-out evaluations, besides those at start and end"),
        group=(8, "completions of a prompt"),
        rate=(1e-5, "learning rate"),
        reward=("last_number", "reward that is trained; random: a control that teaches nothing"),
        like_trl=(False, "train with hocket once more, its loss averaged as TRL's"),
        without_trl=(False, "hocket alone; nothing is installed"),
        as_trl=("", "for its own child process: what is chosen here, as JSON"),
    )
    arguments.add_argument("model", type=Path, help="its folder")
    arguments.add_argument("output", type=Path, help="folder of curve.jsonl, curve.svg and the runs' logs")
    chosen = arguments.parse_args()
    if chosen.as_trl:
        play_trl(json.loads(chosen.as_trl))
    else:
        main(chosen)
