"""One optimizer step of hocket beside a bare PyTorch loop and beside the padded way; memory of the log-probs.

All ways take the same step on the same samples: a random Qwen2, the default policy loss, AdamW, gradients clipped.

- hocket: `Trainer.step`, from samples to new weights (DeepSpeed, ZeRO as configured).
- bare: the same packed micro-batches, forward and loss in a plain loop with torch's AdamW.
- padded: transformers' model on right-padded rows with an attention mask, logits of every position at once; the step
  is padded once, to its longest sequence.
- trimmed: the same, with each micro-batch cut to its own longest sequence, in the order in which sequences come.

The spread is longest / shortest sequence; lengths are the quantiles of a log-uniform distribution between the two, in
random order. A quarter of each is prompt. A step has four micro-batches, as one of the default config has that samples
128 completions of 256 tokens: what a step costs besides them is shared by so many. On a CPU the ways alternate, in one
process of one thread, and its processor time is counted, so that what else the machine does matters little; on a GPU
each has a process of its own, and the wall clock. Memory is measured in fresh processes: what the resident set grows by
on a CPU, what torch has allocated on a GPU. Prints a line for each spread and way: tokens/s, the median of the seconds,
the least and the most, TFLOP/s; what hocket's step goes to; MiB at the peak of each way, and of the log-probs alone for
sizes of vocabulary and sequence, computed in chunks and with all logits at once.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shared import make_model, parser

if __name__ == "__main__":  # --help does not wait for what follows
    PARSER = parser(
        __doc__,
        hidden=(512, "width of the model, a multiple of 64"),
        layers=(9, "layers of the model"),
        vocabulary=(8192, "tokens that the model knows, at least 1000"),
        tokens=(2048, "tokens of a micro-batch"),
        micro_batches=(4, "micro-batches of a step, about"),
        longest=(512, "tokens of the longest sequence"),
        rounds=(5, "rounds that count, after one that warms up"),
        gradient_checkpointing=(False, "recompute activations"),
        vocabularies=([12_500, 25_000, 50_000], "tokens, for the log-probs alone"),
        lengths=([1024, 2048, 4096], "tokens of a sequence, for the log-probs alone"),
        measure=("", "for its own child process: what it is to measure, as JSON"),
    )
    PARSER.add_argument("--preset", choices=["1.5b"], help="sizes of Qwen2.5-1.5B")
    PARSER.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the computation")
    PARSER.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of hocket's config")
    WAYS, PARTS = ["hocket", "bare", "padded", "trimmed"], ["times", "memory", "logprobs"]
    PARSER.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="hocket, and some of the others")
    PARSER.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of the report")
    OPTIONS = PARSER.parse_args()

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from hocket import config as configs
from hocket.algorithm.losses import LossOutput, policy_loss
from hocket.trainer.batching import TrainBatch, divide
from hocket.trainer.flops import model_flops, peak_flops, step_flops
from hocket.trainer.logprobs import CHUNK_TOKENS, token_logprobs
from hocket.trainer.packing import num_positions
from hocket.trainer.policy import Policy, skeleton
from hocket.trainer.trainer import Trainer
from hocket.types import TokenSequence, TrainSample
from support.processes import Process

SPREADS = (1, 4, 16)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Step = Callable[[Sequence[TrainSample]], object]


def make_config(folder: Path, options: argparse.Namespace) -> None:
    """Writes config and tokenizer of a Qwen2; its weights are random."""
    heads = options.hidden // 64
    sizes = {
        "vocab_size": options.vocabulary,
        "intermediate_size": options.hidden * 11 // 4 // 64 * 64,
        "num_hidden_layers": options.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": next(n for n in range(max(1, heads // 4), 0, -1) if heads % n == 0),
    }
    if options.preset == "1.5b":  # Qwen2.5-1.5B
        sizes = {
            "vocab_size": 151_936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        }
    make_model(folder, options.hidden, weights=False, max_position_embeddings=32_768, **sizes)


def make_samples(spread: int, options: argparse.Namespace) -> list[TrainSample]:
    """Returns about so many micro-batches' worth of positions."""
    draw, samples = random.Random(spread), []
    mean = options.longest * (1 - 1 / spread) / math.log(spread) if spread > 1 else options.longest
    number = round(options.micro_batches * options.tokens / mean)
    lengths = [round(options.longest * spread ** -((index + 0.5) / number)) for index in range(number)]
    for length in draw.sample(lengths, number):
        prompt = length // 4
        samples.append(
            TrainSample(
                sequence=TokenSequence(
                    token_ids=array("I", [draw.randrange(1000) for _ in range(length + 1)]),
                    mask=(False,) * prompt + (True,) * (length + 1 - prompt),
                    logprobs=(0.0,) * prompt + (-9.0,) * (length + 1 - prompt),
                ),
                advantages=(0.0,) * prompt + (draw.gauss(0, 1),) * (length + 1 - prompt),
            )
        )
    return samples


def settings(folder: Path, options: argparse.Namespace) -> configs.Config:
    return configs.load(
        None,
        [
            f"model.path={folder}",
            "model.random_init=true",
            f"model.dtype={options.dtype}",
            f"trainer.micro_batch_tokens={options.tokens}",
            f"trainer.gradient_checkpointing={str(options.gradient_checkpointing).lower()}",
            *options.set,
        ],
    )


class Loop:
    """A plain training loop: float32 weights, autocast where another precision is asked for."""

    def __init__(self, model: nn.Module, config: configs.Config) -> None:
        self.model = model.to(DEVICE)
        self.config = config
        self.loss = functools.partial(policy_loss, config=config.algorithm.loss(config.rollout.max_tokens))
        self.dtype = getattr(torch, config.model.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    def apply(self, outputs: Sequence[Callable[[], LossOutput]]) -> None:
        """Takes one step on the micro-batches' shares of the loss."""
        self.optimizer.zero_grad()
        for output in outputs:
            with torch.autocast(DEVICE.type, self.dtype, enabled=self.dtype != torch.float32):
                loss = output().loss
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.trainer.max_grad_norm)
        self.optimizer.step()


def bare(config: configs.Config) -> Step:
    """The packed step without DeepSpeed, ranks or statistics."""
    policy = Policy(
        config.model,
        dtype=torch.float32,
        temperature=1.0,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
    )
    loop = Loop(policy, config)

    def share(batch: TrainBatch) -> LossOutput:
        logprobs, entropy, *_ = policy(batch)
        return loop.loss(logprobs, entropy, batch)

    def step(samples: Sequence[TrainSample]) -> None:
        [makes] = divide(samples, micro_batch_tokens=int(config.trainer.micro_batch_tokens), num_ranks=1)
        loop.apply([functools.partial(share, make(DEVICE)) for make in makes])

    return step


def padded(config: configs.Config, *, trim: bool = False) -> Step:
    """The usual step: rows as long as the longest of the step or, trimmed, of their micro-batch, and all logits."""
    torch.manual_seed(config.trainer.seed)
    architecture = Qwen2Config.from_pretrained(config.model.path)
    model = AutoModelForCausalLM.from_config(architecture, attn_implementation="sdpa", dtype=torch.float32)
    if config.trainer.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loop, max_tokens = Loop(model.train(), config), int(config.trainer.micro_batch_tokens)

    def share(rows: Sequence[TrainSample], width: int, num_tokens: int) -> LossOutput:

        def tensor(values: Callable[[TrainSample], Sequence[Any]], filler: Any) -> torch.Tensor:
            full = [[*values(row), *[filler] * (width - num_positions(row))] for row in rows]
            return torch.tensor(full, device=DEVICE)

        ids, targets = tensor(lambda s: s.sequence.token_ids[:-1], 0), tensor(lambda s: s.sequence.token_ids[1:], 0)
        attention = tensor(lambda s: [1] * num_positions(s), 0)
        logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits.float()
        logprobs = logits.log_softmax(dim=-1).gather(-1, targets[..., None]).squeeze(-1)
        mask = tensor(lambda s: s.sequence.mask[1:], False)
        [[make]] = divide(rows, micro_batch_tokens=10**9, num_ranks=1)
        batch = dataclasses.replace(
            make(DEVICE),
            mask_bt=mask,
            rollout_logprobs_bt=tensor(lambda s: s.sequence.logprobs[1:], 0.0),
            advantages_bt=tensor(lambda s: s.advantages[1:], 0.0),
            sample_bt=torch.arange(len(rows), device=DEVICE)[:, None].expand_as(mask),
            num_tokens_global=num_tokens,
        )
        return loop.loss(logprobs, torch.zeros_like(logprobs), batch)

    def step(samples: Sequence[TrainSample]) -> None:
        def width(rows: Sequence[TrainSample]) -> int:
            return max(num_positions(sample) for sample in (rows if trim else samples))

        num_tokens = sum(sum(sample.sequence.mask[1:]) for sample in samples)
        micro_batches: list[list[TrainSample]] = [[]]
        for sample in samples:
            more = [*micro_batches[-1], sample]
            if width(more) * len(more) > max_tokens:
                micro_batches.append([])
            micro_batches[-1].append(sample)
        loop.apply([functools.partial(share, rows, width(rows), num_tokens) for rows in micro_batches if rows])

    return step


def make(way: str, config: configs.Config) -> Step:
    """Returns one step of the way."""
    if way == "hocket":
        return Trainer(config).step
    return bare(config) if way == "bare" else padded(config, trim=way == "trimmed")


def phases(config: configs.Config, samples: Sequence[TrainSample]) -> dict[str, float]:
    """Returns the seconds of one hocket step by what they go to, the second one of a trainer."""
    trainer = Trainer(config)
    trainer.step(samples)
    spent: dict[str, float] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = now()
            result = call(*args, **kwargs)
            spent[name] = spent.get(name, 0.0) + now() - start
            return result

        return wrapper

    engine: Any = trainer.engine
    for name in ("forward", "backward", "step"):
        setattr(engine, name, timed(name, getattr(engine, name)))
    start = now()
    trainer.step(samples)
    whole = now() - start
    return {**spent, "the rest": whole - sum(spent.values())}


def now() -> float:
    """Returns the wall clock, once the GPU has done what it was asked; on a CPU, this process's processor time."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def timings(
    ways: Sequence[str], config: configs.Config, options: argparse.Namespace
) -> dict[str, dict[int, list[float]]]:
    """Returns seconds per step by way and spread, all ways in turn within a round; the first round warms up."""
    steps = {way: make(way, config) for way in ways}
    found: dict[str, dict[int, list[float]]] = {way: {spread: [] for spread in SPREADS} for way in ways}
    for spread in SPREADS:
        samples = make_samples(spread, options)
        for number in range(options.rounds + 1):
            for way, step in steps.items():
                start = now()
                step(samples)
                if number > 0:
                    found[way][spread].append(now() - start)
    return found


def peak(work: Callable[[], object]) -> float:
    """Returns by how many MiB memory grew at most while it ran. Only the first call of a process can tell on a CPU."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20


def logprob_step(num_tokens: int, vocabulary: int, in_chunks: bool) -> None:
    """Log-probs and entropies of that many tokens, and their backward pass, in chunks or with all logits at once."""
    head = nn.Linear(512, vocabulary, bias=False, device=DEVICE)
    hidden = torch.randn(1, num_tokens, 512, device=DEVICE, requires_grad=True)
    targets = torch.zeros(1, num_tokens, dtype=torch.long, device=DEVICE)
    if in_chunks:
        every = torch.arange(num_tokens, device=DEVICE)
        logprobs, *_ = token_logprobs(
            hidden,
            head,
            targets,
            temperature=1.0,
            chunk_tokens=CHUNK_TOKENS,
            trained_n=every,
            row_n=every,
            max_tokens=num_tokens,
        )
    else:
        full = head(hidden).float().log_softmax(dim=-1)
        logprobs = full.gather(-1, targets[..., None]).squeeze(-1)
        with torch.no_grad():
            _ = -(full.exp() * full).sum(dim=-1)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]


def in_child(options: Sequence[str], **measure: Any) -> Any:
    """Runs this file in a fresh process for one measurement and returns what it found."""
    environment = {"PYTHONWARNINGS": "ignore"}
    if measure["kind"] in ("memory", "logprobs"):  # blocks are given back at once: the resident set is what is in use
        environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    command = [*options, "--measure", json.dumps(measure)]
    with tempfile.TemporaryDirectory() as folder:
        with Process(command, Path(folder) / "log", program=[__file__], **environment) as child:
            if child.wait_end(3600):
                sys.exit(child.output())
        return json.loads(next(line for line in reversed(child.output().splitlines()) if line[:1] in "{[0123456789"))


def answer(options: argparse.Namespace) -> Any:
    """Does the one measurement that the parent asked for."""
    measure = json.loads(options.measure)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # or the trainer would choose
    if measure["kind"] == "logprobs":
        logprob_step(64, 64, True)  # what libraries load once is not part of it
        return peak(lambda: logprob_step(*measure["sizes"]))
    with tempfile.TemporaryDirectory() as folder:
        make_config(Path(folder), options)
        config = settings(Path(folder), options)
        if measure["kind"] == "phases":
            return phases(config, make_samples(4, options))
        if measure["kind"] == "times":
            return timings(measure["ways"], config, options)
        samples = make_samples(4, options)

        def work() -> None:
            step = make(measure["way"], config)
            for _ in range(2):  # the second has AdamW's moments beside the activations
                step(samples)

        return peak(work)


def report_times(arguments: Sequence[str], options: argparse.Namespace) -> None:
    """Prints step times, and their ratios round by round, which other load disturbs least."""
    groups = [[way] for way in options.ways] if DEVICE.type == "cuda" else [options.ways]
    times: dict[str, dict[str, list[float]]] = {}
    for ways in groups:
        times |= in_child(arguments, kind="times", ways=ways)
    with tempfile.TemporaryDirectory() as folder:
        make_config(Path(folder), options)
        model = skeleton(settings(Path(folder), options).model)
    flops, size = model_flops(model), sum(p.numel() for p in model.parameters()) / 1e6
    print(
        f"{size:.1f} M parameters, {options.dtype} on {DEVICE.type}, {options.tokens} tokens per micro-batch, about "
        f"{options.micro_batches} of them per step, {options.rounds} rounds after one to warm up"
    )
    for spread in SPREADS:
        samples = make_samples(spread, options)
        lengths = [num_positions(sample) for sample in samples]
        needed = step_flops(flops, lengths, sum(sum(sample.sequence.mask[1:]) for sample in samples))
        print(f"spread {spread}x: {len(lengths)} sequences of {min(lengths)} to {max(lengths)}, {sum(lengths)} tokens")
        for way in options.ways:
            mine, hocket = times[way][str(spread)], times["hocket"][str(spread)]
            median = statistics.median(mine)
            ratio = statistics.median(a / b for a, b in zip(mine, hocket, strict=True))
            share = needed / median / peak_flops(DEVICE, getattr(torch, options.dtype))
            print(
                f"  {way:>7}: {sum(lengths) / median:8.0f} tokens/s, {median:.3f} s ({min(mine):.3f}..{max(mine):.3f}),"
                f" {needed / median / 1e12:.3f} TFLOP/s{f', MFU {share:.0%}' if DEVICE.type == 'cuda' else ''}; "
                f"hocket is {ratio:.2f} x as fast"
            )
    spent = in_child(arguments, kind="phases")
    parts = ", ".join(f"{name} {seconds / sum(spent.values()):.0%}" for name, seconds in spent.items())
    print(f"  a step of hocket (4x) is {parts}")


def report_memory(arguments: Sequence[str], options: argparse.Namespace) -> None:
    """Prints the peak memory of each way."""
    for way in options.ways:
        print(f"  {way:>7}: peak memory {in_child(arguments, kind='memory', way=way):7.0f} MiB (4x)", flush=True)


def report_logprobs(arguments: Sequence[str], options: argparse.Namespace) -> None:
    """Prints peak memory against sequence length and vocabulary, in chunks and whole."""
    print(f"log-probs, entropies and backward, hidden size 512, float32: peak MiB in chunks of {CHUNK_TOKENS} | whole")
    for vocabulary in options.vocabularies:
        for tokens in options.lengths:
            parts, whole = (
                in_child(arguments, kind="logprobs", sizes=[tokens, vocabulary, size]) for size in (True, False)
            )
            print(f"  {vocabulary:6} x {tokens:5}: {parts:6.0f} | {whole:6.0f}  ({parts / whole:.2f})", flush=True)


def main(arguments: Sequence[str], options: argparse.Namespace) -> None:
    if options.measure:
        print(json.dumps(answer(options)))
        return
    for part, report in {"times": report_times, "memory": report_memory, "logprobs": report_logprobs}.items():
        if part in options.only:
            report(arguments, options)


if __name__ == "__main__":
    main(sys.argv[1:], OPTIONS)
