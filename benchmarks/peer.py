"""hocket beside TRL: the same model, prompts, lengths, reward and mathematics, in turns on one machine.

The model is a Qwen2 with random weights. Every token ends the completion with the same probability, 1 / `--mean`;
without --mean completions are cut off at `--tokens`. `--model` takes a real one, which is asked for stories by its
chat template. The reward is random, the loss GRPO's with the tokens of the batch as denominator, clip 0.2, no KL,
AdamW at 1e-6, gradients clipped to 1, `--dtype`, no activation checkpointing; `--lora` trains an adapter.

TRL is installed into a folder of its own below ~/.cache/hocket. It generates with transformers, as it does by default.
hocket is started by the command `quickstart`. Micro-batches have `--trl-batch` completions, in hocket as many tokens.
Prints a line for TRL and for each max_staleness of hocket: seconds of a step and of its parts, medians of the steps
after the first one; seconds of all processors that a step takes, looked at twice a second; tokens per second; GiB of
memory, which is what all processes together have in RAM at most, with shared pages counted once.

`--shapes` does so for several lengths, `--held` for five that the docs quote, with hocket's own micro-batches.
"""

import argparse
import contextlib
import json
import os
import random
import signal
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
        layers=(8, "layers of the model"),
        hidden=(512, "width of the model, a multiple of 64"),
        model=("", "folder of a model, in place of --layers, --hidden, --prompt and --mean"),
        lora=(0, "rank of an adapter for all linear layers; 0: the whole model is trained"),
        dtype=("float32", "float32 or bfloat16"),
        prompts=(8, "prompts of a step"),
        prompt=(64, "tokens of a prompt, about"),
        tokens=(128, "tokens of the longest completion"),
        group=(8, "completions of a prompt"),
        shapes=("", "PROMPT/TOKENS/GROUP,...: one after the other, in place of --prompt, --tokens and --group"),
        held=(False, "five shapes that the docs quote, with hocket's defaults"),
        mean=(0.0, "tokens of a completion on average, if none were cut off; 0: all are"),
        updates=(1, "passes over a batch, each with one update"),
        staleness=([0, 1], "values of hocket's pipeline.max_staleness"),
        steps=(6, "steps of each run; the first one does not count"),
        rounds=(1, "runs of TRL, and of hocket with each max_staleness"),
        trl_batch=(16, "completions of a micro-batch"),
        without_trl=(False, "hocket alone; nothing is installed"),
        as_trl=("", "for its own child process: what is chosen here, as JSON"),
    ).parse_args()

import numpy as np
import psutil
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer

from hocket.observe.rows import read_lines, read_metrics
from support.processes import Process

TRL = ("trl==1.16.0", "accelerate==1.15.0", "peft==0.21.2")
HELD = "20/128/8,64/64/8,256/64/8,512/128/8,512/128/16"
VOCABULARY = 10_240
WORD_TOKENS = 4
COLD_STEPS = 1
ADJECTIVES = ["ancient", "brave", "clever", "crowded", "distant", "frozen", "gentle", "golden", "hungry", "quiet"]
NOUNS = ["bridge", "castle", "engine", "fox", "garden", "mountain", "piano", "river", "sailor", "teacher"]
Figures = dict[str, list[float]]  # per step
Clock = list[tuple[float, float]]  # (Unix time, processor seconds so far)


def make_model(folder: Path, options: argparse.Namespace) -> None:
    """Write a model that ends with a constant probability, and its tokenizer, and prompts."""
    draw = random.Random(0)
    words = max(1, options.prompt // WORD_TOKENS)
    texts = [" ".join("".join(draw.choices(string.ascii_lowercase, k=6)) for _ in range(words)) for _ in range(2048)]
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<eos>", "<pad>"]
    pieces.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    )
    learnt = json.loads(pieces.to_str())["model"]
    merges = [tuple(merge) for merge in learnt["merges"]]
    tokenizer = Qwen2Tokenizer(learnt["vocab"], merges, unk_token="<pad>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4 // 64 * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 256),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # all states point about the same way: 8 times their length is noise of embeddings and layers
        model.get_input_embeddings().weight[:, 0] += 8.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[0] = 0.0
        logits_bv = model(torch.arange(2, 202)[:, None]).logits[:, -1]
        wanted = logits_bv[:, 1:].logsumexp(-1).mean() - (
            torch.tensor(options.mean - 1.0).log() if options.mean else 20
        )
        state = model.model(torch.arange(2, 202)[:, None]).last_hidden_state[:, -1, 0].mean()
        model.lm_head.weight[0, 0] = wanted / state
    model.save_pretrained(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts[:512]))
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters", flush=True)


def ask_for_stories(folder: Path) -> None:
    """Write chats of about 45 tokens, whose answers are long."""
    draw = random.Random(0)
    lines = []
    for number in range(512):
        things = [f"{draw.choice(ADJECTIVES)} {draw.choice(NOUNS)}" for _ in range(2)]
        text = f"Write a long story about a {things[0]} and a {things[1]}, number {number}."
        lines.append(json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines))


def watched(command: list[str], log: Path, **process: Any) -> tuple[float, Clock]:
    """Run a command to its end; return the most GiB of RAM of its processes together, and how long they had worked."""
    largest = 0
    worked: dict[int, float] = {}  # by process
    clock: Clock = []
    with Process(command, log, **process) as child:
        while child.popen.poll() is None:
            sizes = []
            for member in child.members():
                with contextlib.suppress(psutil.Error):
                    sizes.append(member.memory_full_info().pss)
                    times = member.cpu_times()
                    worked[member.pid] = times.user + times.system
            largest = max(largest, sum(sizes))
            clock.append((time.time(), sum(worked.values())))
            time.sleep(0.5)
        if status := child.popen.poll():
            sys.exit(f"{' '.join(command)}\nended with {status}:\n{child.output()[-3000:]}")
    return largest / 2**30, clock


def hocket(data: Path, folder: Path, staleness: int, options: argparse.Namespace) -> tuple[Figures, float, Clock]:
    """Train with hocket's quickstart."""
    settings = [
        f"run.dir={folder}/run",
        f"model.path={options.model or data}",
        f"model.dtype={options.dtype}",
        f"data.source={data}/prompts.jsonl",
        "data.answer_column=null",
        "rewards.functions={random: 1}",
        f"rollout.prompts_per_step={options.prompts}",
        f"rollout.group_size={options.group}",
        f"rollout.max_tokens={options.tokens}",
        f"algorithm.epochs={options.updates}",
        f"pipeline.max_staleness={staleness}",
        f"trainer.steps={options.steps}",
        "trainer.learning_rate=1e-6",
        "trainer.gradient_checkpointing=false",
        "eval.num_prompts=0",
        "checkpoint.every_steps=0",
    ]
    settings.append("model.max_length=1024" if options.model else "data.chat_template=false")
    if options.lora:
        settings.append(f"model.lora={{rank: {options.lora}, alpha: {2 * options.lora}}}")
    if not options.held:
        settings.append(f"trainer.micro_batch_tokens={options.trl_batch * (options.tokens + options.prompt)}")
    memory, clock = watched(["quickstart", *settings, *options.settings], folder / "log")
    steps: list[dict[str, Any]] = [step for step in read_metrics(folder / "run") if step.get("time/step")]
    spans = read_lines(folder / "run/timeline.jsonl")
    ends = {span["step"]: span["end"] for span in spans if span.get("who") == "trainer"}  # the last one's
    generate = "time/generate" if staleness == 0 else "time/batch"
    return (
        {
            "step": [step["time/step"] for step in steps],
            "generate": [step[generate] for step in steps],
            "train": [step.get("time/train", 0.0) + step.get("time/measure", 0.0) for step in steps],
            "tokens": [step["rollout/tokens"] for step in steps],
            "end": [ends[step["step"]] for step in steps],
        },
        memory,
        clock,
    )


def home_of_trl() -> Path:
    """Return the folder of its own into which TRL is installed, unless it is."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hocket" / TRL[0]
    if not (home / "complete").exists():
        print(f"installing {' '.join(TRL)} into {home}", flush=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(home), *TRL]
        subprocess.run(command, check=True)
        (home / "complete").touch()
    return home


def trl(data: Path, folder: Path, options: argparse.Namespace) -> tuple[Figures, float, Clock]:
    """Train with TRL."""
    home = home_of_trl()
    model = options.model or str(data)
    told = {**vars(options), "model": model, "data": str(data), "output": str(folder)}
    own = {"program": [__file__], "PYTHONPATH": str(home), "WANDB_DISABLED": "true"}
    memory, clock = watched(["--as-trl", json.dumps(told)], folder / "log", **own)
    return json.loads((folder / "figures.json").read_text()), memory, clock


def play_trl(told: dict[str, Any]) -> None:
    """Train with TRL in this process, and write its figures."""
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    figures: Figures = {"step": [], "generate": [], "train": [], "tokens": [], "end": []}
    generated, tokens, last = [0.0], [0], [0.0]

    class Timed(GRPOTrainer):  # type: ignore[misc]  # TRL is not there
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = super()._generate(*args, **kwargs)
            generated[0] += time.perf_counter() - begin
            return result

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens[0] += sum(map(len, completion_ids))
        return [random.random() for _ in completion_ids]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            last[0] = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % told["updates"]:
                return
            seconds, last[0] = time.perf_counter() - last[0], time.perf_counter()
            for name, value in (("step", seconds), ("generate", generated[0]), ("train", seconds - generated[0])):
                figures[name].append(value)
            figures["tokens"].append(tokens[0])
            figures["end"].append(time.time())
            generated[0], tokens[0] = 0.0, 0

    settings = GRPOConfig(
        output_dir=told["output"],
        use_cpu=not torch.cuda.is_available(),
        bf16=told["dtype"] == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=told["trl_batch"],
        gradient_accumulation_steps=told["prompts"] * told["group"] // told["trl_batch"],
        num_generations=told["group"],
        num_iterations=told["updates"],
        max_completion_length=told["tokens"],
        max_steps=told["steps"] * told["updates"],
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = datasets.Dataset.from_json(f"{told['data']}/prompts.jsonl")
    adapter = None
    if told["lora"]:
        from peft import LoraConfig

        adapter = LoraConfig(r=told["lora"], lora_alpha=2 * told["lora"], target_modules="all-linear")
    trainer = Timed(told["model"], reward, settings, train_dataset=data, callbacks=[Clock()], peft_config=adapter)
    trainer.train()
    Path(told["output"], "figures.json").write_text(json.dumps(figures))


def processor_seconds(figures: Figures, clock: Clock) -> float:
    """Return the seconds that a step takes of all processors together."""
    ends = figures["end"][COLD_STEPS - 1 :]
    times, worked = zip(*clock, strict=True)
    seconds = np.interp([ends[0], ends[-1]], times, worked)
    return float(seconds[1] - seconds[0]) / (len(ends) - 1)


def show(name: str, figures: Figures, memory: float, clock: Clock) -> tuple[float, float]:
    """Print a row, and return the seconds of a step: of the wall clock, and of all processors."""
    step, generate, train = (statistics.median(figures[key][COLD_STEPS:]) for key in ("step", "generate", "train"))
    speed = sum(figures["tokens"][COLD_STEPS:]) / sum(figures["step"][COLD_STEPS:])
    length = statistics.mean(figures["tokens"][COLD_STEPS:])
    worked = processor_seconds(figures, clock)
    print(
        f"{name:16} {step:6.2f} s a step, generate {generate:6.2f}, train {train:6.2f}, {speed:6.0f} tokens/s of "
        f"{length:.0f} a step, {worked:.2f} s of processors, {memory:.2f} GiB",
        flush=True,
    )
    return step, worked


def main(options: argparse.Namespace) -> None:
    if options.as_trl:
        play_trl(json.loads(options.as_trl))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what `watched` has started, too
    shapes = (HELD if options.held else options.shapes) or f"{options.prompt}/{options.tokens}/{options.group}"
    for shape in shapes.split(","):
        options.prompt, options.tokens, options.group = map(int, shape.split("/"))
        print(f"prompt/completion/group {shape}", flush=True)
        with tempfile.TemporaryDirectory() as name:
            compare(Path(name), options)


def compare(folder: Path, options: argparse.Namespace) -> None:
    data = folder / "model"
    if options.model:
        data.mkdir()
        ask_for_stories(data)
    else:
        make_model(data, options)
    for number in range(options.rounds):
        if not options.without_trl:
            (folder / f"trl-{number}").mkdir()
            theirs = show("TRL", *trl(data, folder / f"trl-{number}", options))
        for staleness in options.staleness:
            own = folder / f"hocket-{number}-{staleness}"
            own.mkdir()
            found = show(f"hocket, k={staleness}", *hocket(data, own, staleness, options))
            if not options.without_trl:
                wall, work = (one / other for one, other in zip(theirs, found, strict=True))
                print(
                    f"{'':16} {wall:.2f} times TRL's steps per second, {work:.2f} per second of processors", flush=True
                )


if __name__ == "__main__":
    main(OPTIONS)
