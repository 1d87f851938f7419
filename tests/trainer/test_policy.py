import random
from pathlib import Path

import pytest
import torch
from tests.trainer.conftest import SIZES
from transformers import Phi3Config, Phi3ForCausalLM, SeedOssConfig, SeedOssForCausalLM

from hocket.algorithm.losses import policy_loss
from hocket.config import LossConfig, ModelConfig
from hocket.errors import ConfigError
from hocket.trainer.policy import Policy
from hocket.trainer.weights import head_of
from hocket.types import TrainSample
from support import training
from support.batches import preset_loss
from support.numbers import rounding
from support.training import CPU, additions, assert_near, gradient_additions, make_rollouts, pack, sample_of, sequence


def make_policy(path: str, **options: object) -> Policy:
    config = ModelConfig(path=path, random_init=bool(options.pop("random_init", False)))
    settings = {"temperature": 0.7} | options
    return Policy(config, dtype=torch.float32, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    rng = random.Random(1)
    return [sample_of(rollout, rng.gauss(0, 1)) for rollout in make_rollouts(17, longest=24, seed=1)]


def loss_and_gradient(
    policy: Policy,
    samples: list[TrainSample],
    micro_batch_tokens: int,
    num_ranks: int,
    config: LossConfig = LossConfig(),  # noqa: B008 - frozen
) -> tuple[float, list[torch.Tensor]]:
    policy.zero_grad()
    total = 0.0
    for batches in pack(samples, micro_batch_tokens=micro_batch_tokens, num_ranks=num_ranks):
        for batch in batches:
            output = policy_loss(*policy(batch)[:2], batch, config)
            output.loss.backward()
            total += output.loss.item()
    return total, [p.grad.clone() for p in policy.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(),
        preset_loss("gspo"),
        LossConfig(correction={"name": "sequence_mask", "bounds": (0.0, 0.05)}, aggregate="seq_mean_token_sum"),
        LossConfig(entropy_coef=0.3, aggregate="seq_mean_token_mean"),
    ],
    ids=["default", "gspo", "sequence_mask", "entropy"],
)
def test_loss_and_gradient_do_not_depend_on_packing(
    tied_model: str, samples: list[TrainSample], config: LossConfig
) -> None:
    policy = make_policy(tied_model, entropy_gradient=config.entropy_coef > 0)
    expected_loss, expected_grads = loss_and_gradient(policy, samples, 1000, 1, config)
    assert abs(expected_loss) > 1e-3
    for shuffled, micro_batch_tokens, num_ranks in (
        (samples, 24, 1),
        (samples[::-1], 60, 1),
        (samples, 60, 3),
        (samples[5:] + samples[:5], 1000, 20),  # more ranks than sequences
    ):
        loss, grads = loss_and_gradient(policy, shuffled, micro_batch_tokens, num_ranks, config)
        assert_same_loss_and_gradient(loss, grads, expected_loss, expected_grads, tied_model)


def assert_same_loss_and_gradient(
    loss: float, grads: list[torch.Tensor], expected_loss: float, expected_grads: list[torch.Tensor], model: str
) -> None:
    apart = rounding(additions(model) + training.POSITIONS)  # of a mean of numbers about 1
    assert loss == pytest.approx(expected_loss, abs=apart)
    # Together: some are only what others leave of each other, as that of a key's bias without rotary positions.
    gradient, expected = (torch.cat([one.flatten() for one in parts]) for parts in (grads, expected_grads))
    assert_near(gradient, expected, gradient_additions(model))


def test_a_float32_head_computes_logits_in_float32_whatever_the_dtype(
    tied_model: str, samples: list[TrainSample]
) -> None:
    [[batch]] = pack(samples)
    found = {}
    for exact in (False, True):
        config = ModelConfig(path=tied_model, float32_head=exact)
        policy = Policy(config, dtype=torch.bfloat16, temperature=0.7)
        hidden = policy._hidden(batch.input_ids_br, batch.segments)
        logits = hidden.double() @ policy.model.lm_head.weight.double().T / 0.7
        expected = logits.log_softmax(-1).gather(-1, batch.target_ids_bt[..., None]).squeeze(-1)
        with torch.autocast("cpu", torch.bfloat16, enabled=exact):  # ZeRO-0 computes so; the head stays out of it
            logprobs, *_ = policy(batch)
        found[exact] = (logprobs - expected)[batch.mask_bt].abs().max().item()
        logprobs.sum().backward()
        assert policy.model.lm_head.weight.grad.dtype == torch.bfloat16
    exact = rounding(32 + 64) * expected.abs().max().item()  # products of 32, a softmax of 64
    assert found[True] < exact < 1e-3 < found[False]  # numbers above 1 are rounded to 16 bits by up to 4e-3


def test_random_weights_depend_on_the_seed_only(tied_model: str) -> None:
    first, again, other = (make_policy(tied_model, random_init=True, seed=seed) for seed in (1, 1, 2))
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.ndim > 1:
            assert not torch.equal(a, c)


@pytest.mark.parametrize("context", [16, 64])
def test_the_context_decides_how_positions_are_scaled_whatever_shares_a_row(context: int, tmp_path: Path) -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = SIZES | {"initializer_range": 0.3, "original_max_position_embeddings": 16}
    Phi3ForCausalLM(Phi3Config(**sizes, rope_scaling=factors)).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), max_length=context)
    policy = Policy(config, dtype=torch.float32, temperature=1.0)
    lengths = (10, min(context, 40))
    short, longer = (sample_of(sequence([place % 62 for place in range(length)])) for length in lengths)
    (alone,) = (policy(batch)[0] for [batch] in pack([short]))
    [[row]] = pack([longer, short])
    assert_near(policy(row)[0][:, -9:], alone, additions(str(tmp_path)))
    model = Phi3ForCausalLM.from_pretrained(tmp_path)
    if context == 64:
        model.model.rotary_emb(torch.zeros(1), torch.full((1, 1), 40))
        model.model.rotary_emb.original_inv_freq = model.model.rotary_emb.inv_freq
    ids = torch.tensor([short.sequence.token_ids])
    expected = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[1:, 0]
    assert_near(alone[0, 1:], expected, additions(str(tmp_path)))


def test_whatever_a_model_calls_its_dropout_is_off(tmp_path: Path) -> None:
    SeedOssForCausalLM(SeedOssConfig(**SIZES, residual_dropout=0.5, attention_dropout=0.5)).save_pretrained(tmp_path)
    make_policy(str(tmp_path)).check_architecture(CPU)


def test_a_missing_model_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"model\.path=/nowhere"):
        make_policy("/nowhere")


@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_from_a_batch_to_its_gradient_nothing_waits_for_the_device(
    tied_model: str, samples: list[TrainSample], preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # which knows no such device
    # On this device whatever asks for a value or a number of values raises, as do tensors that were left on the CPU.
    device = torch.device("meta")
    policy = make_policy(tied_model).to(device)
    [[batch, *_]] = pack(samples, device, micro_batch_tokens=100)
    policy_loss(*policy(batch)[:2], batch, preset_loss(preset)).loss.backward()
    assert all(p.grad is not None and p.grad.device == device for p in policy.parameters())


def test_the_logits_of_a_row_with_fewer_log_probs_than_the_model_has_weights_are_computed_once_on_a_cpu(
    tied_model: str, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.trainer.logprobs.KEPT_BYTES", 0)
    policy = make_policy(tied_model)
    num_weights = sum(parameter.numel() for parameter in policy.parameters())
    calls: list[object] = []
    head_of(policy.model).register_forward_hook(lambda *call: calls.append(call))
    for count, expected in ((len(samples), 1), (2 * len(samples), 2)):  # in the backward pass, too
        [[batch]] = pack((samples * 2)[:count], micro_batch_tokens=10_000)
        assert (batch.max_tokens * policy.vocab_size <= num_weights) == (expected == 1)
        calls.clear()
        policy(batch)[0].sum().backward()
        assert len(calls) == expected
