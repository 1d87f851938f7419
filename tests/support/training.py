"""What the tests of the trainer build and read in common."""

import dataclasses
import functools
import gc
import itertools
import json
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hocket import config as config_module
from hocket.trainer.batching import TrainBatch, divide
from hocket.trainer.checkpoints import write_bucket
from hocket.trainer.objective import BatchLoss, Objective
from hocket.trainer.packing import chosen_packer
from hocket.trainer.ranks import Ranks
from hocket.trainer.state import SavedTensors
from hocket.trainer.trainer import Trainer
from hocket.types import TokenSequence, TrainSample
from support.numbers import rounding

CPU = torch.device("cpu")
SEEN = 64
"""More positions than one of these tests' sequences has: what attention sums over."""
POSITIONS = 1000
"""More positions than a step of these tests has: what its metrics and gradients are summed over."""


@functools.cache
def additions(model: str) -> int:
    """Returns how many additions follow each other on the way from a token of a model to a log-prob."""
    whole = AutoConfig.from_pretrained(model)
    text, count = whole.get_text_config(), 0
    for tower in (text, *([whole.vision_config] if hasattr(whole, "vision_config") else [])):
        # Two norms, the products with keys, scores, outputs, two of the MLP; softmax and sum of what is seen.
        layer = 6 * tower.hidden_size + tower.intermediate_size + 2 * SEEN
        count += (tower.depth if hasattr(tower, "depth") else tower.num_hidden_layers) * layer
    return int(count + 2 * text.hidden_size + text.vocab_size)  # the last norm, the head, the softmax


def gradient_additions(model: str) -> int:
    """Returns those on the way to a gradient: each product of the forward pass has two in the backward pass."""
    return 3 * additions(model) + POSITIONS


def assert_near(found: Any, expected: Any, count: int) -> None:
    """Asserts that numbers lie apart by the rounding of so many additions, relative to the largest of them all."""
    found, expected = torch.as_tensor(found).detach(), torch.as_tensor(expected).detach()
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding(count) * float(expected.abs().max()))


def assert_same_metrics(found: Mapping[str, float], expected: Mapping[str, float], model: str) -> None:
    """Asserts that the metrics of a step, means of numbers about 1, lie apart by rounding alone."""
    parameters = Path(model, "model.safetensors").stat().st_size // 4  # a norm sums the squares of all gradients
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        is_norm = name.endswith("grad_norm")
        away = rounding(gradient_additions(model) + parameters if is_norm else additions(model) + POSITIONS)
        assert found[name] == pytest.approx(value, rel=away, abs=away, nan_ok=True), name


def assert_same_states(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    model: str,
    updates: float,
    rate: float = 1e-3,
) -> None:
    """Asserts that AdamW holds the same of each learner after updates at this rate at most, but for rounding.

    Gradients, and so their means, lie apart by the rounding of numbers as large as the largest of their model. AdamW
    divides each by its own size: one that is only what such numbers leave of each other (a key's bias has no gradient
    at all without rotary positions) may take a step of any size, up to the rate, against one in the other direction.
    """
    assert found.keys() == expected.keys()
    for learner in {key.partition("/")[0] for key in expected}:
        squares = {key: tensor for key, tensor in expected.items() if key.startswith(f"{learner}/exp_avg_sq/")}
        sizes = {key: (tensor / (1 - 0.999**updates)).sqrt() for key, tensor in squares.items()}
        apart = rounding(gradient_additions(model)) * max(float(size.max()) for size in sizes.values())
        for key, size in sizes.items():
            mean, master = (key.replace("/exp_avg_sq/", f"/{kind}/") for kind in ("exp_avg", "master"))
            assert (found[mean] - expected[mean]).abs().max() <= apart * (1 - 0.9**updates), mean
            steps = (2 * apart / (size + 1e-8)).clamp(max=2.0)
            most = updates * rate * steps + rounding(int(updates)) * expected[master].abs()
            assert bool(((found[master] - expected[master]).abs() <= most).all()), master


def make_trainer(ranks: Ranks, model: str, *settings: str, loss: BatchLoss | None = None) -> Trainer:
    """Returns a trainer in float32 with small micro-batches, unless the settings say otherwise."""
    defaults = ("model.dtype=float32", "trainer.learning_rate=1e-3", "trainer.micro_batch_tokens=40")
    return Trainer(
        config_module.load(None, [*defaults, f"model.path={model}", *settings]),
        ranks=ranks,
        objective=Objective(loss=loss) if loss else None,
    )


def sequence(token_ids: Sequence[int], mask: Sequence[bool] | int = 2, *, logprob: float = -3.0) -> TokenSequence:
    """Returns a sequence whose tokens were sampled where the mask says so, or behind a prompt of that length."""
    if isinstance(mask, int):
        mask = tuple(index >= mask for index in range(len(token_ids)))
    return TokenSequence(
        token_ids=array("I", token_ids), mask=tuple(mask), logprobs=tuple(logprob if m else 0.0 for m in mask)
    )


def sample_of(rollout: TokenSequence, advantage: float = 1.0, **more: Any) -> TrainSample:
    """Returns a sample with the same advantage for all sampled tokens."""
    return TrainSample(sequence=rollout, advantages=tuple(advantage if m else 0.0 for m in rollout.mask), **more)


def pack(samples: Sequence[TrainSample], device: torch.device = CPU, **how: Any) -> list[list[TrainBatch]]:
    """Returns the micro-batches of each rank; in one row of one rank if nothing is said.

    share: pairs of tokens whose attention costs as much as a position; without it nothing is shared.
    """
    pairs, key_share = how.pop("share", 0.0), how.pop("key_share", 0.0)
    if pairs:
        how["packer"] = chosen_packer(True, pairs=float(pairs), key_share=key_share)
    shares = divide(samples, **{"micro_batch_tokens": 10_000, "num_ranks": 1, **how})
    return [[make(device) for make in share] for share in shares]


def make_samples(count: int = 5) -> list[TrainSample]:
    """Returns samples of nine random tokens, the last seven of them sampled."""
    rng = random.Random(count)
    return [sample_of(sequence([rng.randrange(62) for _ in range(9)]), rng.gauss(0, 1)) for _ in range(count)]


def make_rollouts(count: int, *, longest: int, seed: int) -> list[TokenSequence]:
    """Returns sequences of 4 tokens and more: two of a prompt, then sampled ones around one that was not."""
    rng = random.Random(seed)
    ids = [[rng.randrange(62) for _ in range(rng.randint(4, longest))] for _ in range(count)]
    return [sequence(one, [index >= 2 and index != 4 for index in range(len(one))]) for one in ids]


def gap_of(trainer: Trainer, samples: Sequence[TrainSample]) -> float:
    """Returns the mean |Δ log-prob| between engine and trainer over the sampled tokens."""
    scored = zip(samples, trainer.logprobs(samples), strict=True)
    rows = [zip(s.sequence.mask[1:], s.sequence.logprobs[1:], own[1:], strict=True) for s, own in scored]
    gaps = [abs(engine - trained) for row in rows for sampled, engine, trained in row if sampled]
    return sum(gaps) / len(gaps)


@torch.no_grad()
def logprobs_of(folder: str | Path, rollouts: Sequence[TokenSequence], temperature: float = 1.0) -> list[list[float]]:
    """Returns transformers' log-probs of the sampled tokens, each sequence alone; 0 where the mask is false."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for rollout in rollouts:
        full = (model(torch.tensor([rollout.token_ids])).logits[0, :-1] / temperature).log_softmax(dim=-1)
        of_tokens = full.gather(-1, torch.tensor(rollout.token_ids[1:])[:, None])[:, 0].tolist()
        found.append([0.0, *(value if m else 0.0 for value, m in zip(of_tokens, rollout.mask[1:], strict=True))])
    return found


def make_groups(model: str, *, prompt: int = 0) -> list[TrainSample]:
    """Returns four groups of three samples, as an engine with slightly other log-probs would have sampled them.

    `prompt`: tokens with which those of a group begin alike.
    """
    rng, rollouts = random.Random(7), make_rollouts(12, longest=20, seed=7)
    begin = [[place // 3 + 7 * i for i in range(prompt)] for place in range(12)]
    rollouts = [
        sequence([*ids, *one.token_ids], [False] * prompt + [*one.mask])
        for ids, one in zip(begin, rollouts, strict=True)
    ]
    samples = []
    for place, (rollout, logprobs) in enumerate(zip(rollouts, logprobs_of(model, rollouts), strict=True)):
        engines = tuple(value + rng.gauss(0, 0.3) * m for value, m in zip(logprobs, rollout.mask, strict=True))
        sampled = dataclasses.replace(rollout, logprobs=engines)
        samples.append(sample_of(sampled, rng.gauss(0, 1), group=place // 3))
    return samples


def measured(trainer: Trainer, samples: Sequence[TrainSample], **more: float) -> list[TrainSample]:
    """Returns the samples with what the trainer measures before the step, and more columns of one number each."""
    found = trainer.measure([sample.sequence for sample in samples]) or [{}] * len(samples)
    result = []
    for sample, numbers in zip(samples, found, strict=True):
        known = {name: tuple(value * m for m in sample.sequence.mask) for name, value in more.items()}
        result.append(dataclasses.replace(sample, columns={**numbers, **known}))
    return result


def save(trainer: Trainer, folder: Path) -> None:
    """Writes the state to a new folder."""
    folder.mkdir(parents=True)
    rest = trainer.state(lambda bucket: write_bucket(folder, bucket))
    (folder / "rest.json").write_text(json.dumps(rest))


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Returns master weights and moments."""
    found: dict[str, torch.Tensor] = {}
    trainer.state(found.update)
    return found


def plain_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns, by a trainer's names, what torch's AdamW holds of a model of transformers."""
    return {
        f"policy/{kind}/model.{name}": tensor.detach().clone()
        for name, parameter in model.named_parameters()
        for kind, tensor in (("master", parameter), *optimizer.state[parameter].items())
        if kind != "step"
    }


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    """Reads the tensors that `save` wrote, of all learners."""
    return {name: tensor for file in folder.glob("state_*.safetensors") for name, tensor in load_file(file).items()}


def load(trainer: Trainer, folder: Path) -> None:
    trainer.restore(SavedTensors(folder), json.loads((folder / "rest.json").read_text()))


def weights_of(trainer: Trainer, max_bytes: int = 1 << 30) -> dict[str, torch.Tensor]:
    """Returns copies of the weights as they are streamed."""
    found: dict[str, torch.Tensor] = {}
    trainer.stream(max_bytes, lambda bucket: found.update((name, tensor.clone()) for name, tensor in bucket))
    return found


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether tensors are the same to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def untimed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics that neither time nor the packing decides."""
    left_out = ("time/train", "train/mfu", "train/tokens_per_s", "train/positions_per_s", "train/micro_batches")
    return {name: value for name, value in metrics.items() if name not in left_out}


SAMPLE_FIELDS = {"id", "text", "token_ids", "mask", "rollout_logprobs", "version_min", "advantages"}


def read_batch(path: Path) -> list[TrainSample]:
    """Reads the samples that guards.keep_batch wrote."""
    return [
        TrainSample(
            id=row["id"],
            sequence=TokenSequence(
                token_ids=array("I", row["token_ids"]),
                mask=tuple(map(bool, row["mask"])),
                logprobs=tuple(row["rollout_logprobs"]),
                version_min=row["version_min"],
            ),
            advantages=tuple(row["advantages"]),
            columns={name: tuple(values) for name, values in row.items() if name not in SAMPLE_FIELDS},
        )
        for row in json.loads(path.read_text(encoding="utf-8"))["samples"]
    ]


def peak_bytes(work: Callable[[], object]) -> int:
    """Returns the most bytes that torch holds on the CPU during the work, beyond those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes))


def storages() -> dict[int, torch.UntypedStorage]:
    """What holds the tensors of this process, but for model files mapped into the CPU's memory.

    While the caller keeps it none of it can go, which parts of earlier trainers otherwise do at any time: DeepSpeed's
    own globals refer to an engine until there is another.
    """
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and value.device == CPU]
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return {key: storage for key, storage in found.items() if storage.resizable()}


def bytes_besides(before: dict[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for key, storage in storages().items() if key not in before)
