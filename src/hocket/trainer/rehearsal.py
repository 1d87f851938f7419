"""How large a micro-batch may be: estimated before anything is loaded, and for `auto` found out by trying two sizes.

Takes a config, and an engine with its share of the loss; gives what a step needs, and a number of tokens. Never knows
real samples.
"""

import functools
import hashlib
import json
import math

import torch

from hocket.config import Config, TrainerConfig
from hocket.errors import TrainerError
from hocket.trainer import memory
from hocket.trainer.batching import pack
from hocket.trainer.engine import DeepSpeedEngine, default_zero_stage
from hocket.trainer.policy import skeleton
from hocket.trainer.ranks import Ranks
from hocket.trainer.update import ShareOfLoss
from hocket.types import TokenSequence, TrainSample

LENGTH = 32
"""Positions of each made-up sequence."""


def estimate(config: Config, dtype: torch.dtype, ranks: Ranks, *, alone: bool) -> memory.Estimate:
    """Returns what a step needs, with the models beside the policy. Raises ConfigError where there is clearly less."""
    device, algorithm = ranks.device, config.algorithm
    quantized = config.model.lora is not None and config.model.lora.quantize is not None
    policy = memory.Model.of(skeleton(config.model), dtype, quantized=quantized)
    critic = reference = None
    if algorithm.baseline == "critic" and not alone:
        critic = memory.Model.of(skeleton(config.model.beside(config.critic.path)), dtype)
    if algorithm.kl != "off" and not alone and (algorithm.reference is not None or config.model.lora is None):
        reference = memory.Model.of(skeleton(config.model.beside(algorithm.reference)), dtype)

    def needed(trainer: TrainerConfig) -> memory.Estimate:
        estimates = [
            memory.estimate(
                model,
                trainer,
                stage=default_zero_stage(trainer, dtype, ranks),
                num_ranks=ranks.size,
                offloads=trainer.offload_optimizer and device.type == "cuda",
            )
            if model is not None
            else None
            for model in (policy, critic, reference)
        ]
        assert estimates[0] is not None
        return memory.together(estimates[0], critic=estimates[1], reference=estimates[2])

    return memory.check(needed, config.trainer, memory.available_bytes(device))


def as_many_as_fit(
    engine: DeepSpeedEngine, loss_of: ShareOfLoss, config: TrainerConfig, ranks: Ranks, *, bytes_to_come: int
) -> int:
    """Returns the micro-batch size that the memory of every rank has room for.

    Args:
        bytes_to_come: what the first real step will take for good.

    Raises:
        TrainerError: not one sequence fits.
    """
    size = max(512, config.logprob_chunk_tokens)
    rehearse = functools.partial(_rehearse, engine, loss_of, ranks.device)
    if ranks.device.type == "cuda":
        rehearse(size)  # what libraries allocate once is not part of a micro-batch
    sizes = (size, 2 * size)
    small, large = ((n, memory.peak_bytes(functools.partial(rehearse, n), ranks.device)) for n in sizes)
    available = memory.available_bytes(ranks.device) - bytes_to_come
    tokens = ranks.smallest(memory.largest_micro_batch(small, large, available))
    if tokens < 2:
        raise TrainerError(
            "trainer.micro_batch_tokens=auto: not even one sequence fits into the memory that is left; set "
            "trainer.gradient_checkpointing=true, a smaller trainer.logprob_chunk_tokens, or take more ranks"
        )
    return tokens


def fingerprint(config: Config, ranks: Ranks) -> str:
    """Returns what differs where another size of micro-batches may fit than did with an earlier config."""
    settings = config.model_dump(
        mode="json",
        include={"model": True, "algorithm": True, "critic": True, "trainer": True},
        exclude={"trainer": {"steps"}},
    )
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"
    return hashlib.sha256(json.dumps([settings, ranks.size, device]).encode()).hexdigest()[:16]


def _rehearse(engine: DeepSpeedEngine, loss_of: ShareOfLoss, device: torch.device, num_positions: int) -> None:
    """Runs forward and backward of made-up sequences; a gradient that is not finite changes nothing."""
    zeros = (0.0,) * (LENGTH + 1)
    sample = TrainSample(
        sequence=TokenSequence(token_ids=(0,) * (LENGTH + 1), mask=(True,) * (LENGTH + 1), logprobs=zeros),
        advantages=zeros,
        ref_logprobs=zeros,
    )
    [[batch]] = pack([sample] * (num_positions // LENGTH), micro_batch_tokens=num_positions, num_ranks=1)
    engine.backward(loss_of(batch.to(device)).loss * math.nan, last=True)
    if engine.step(rescale=False) is not None:
        raise TrainerError(
            "the rehearsal of a step has changed the weights; set trainer.micro_batch_tokens to a number"
        )
