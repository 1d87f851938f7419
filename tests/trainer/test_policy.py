import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from hocket.algorithm.losses import LossConfig, policy_loss
from hocket.config import ModelConfig
from hocket.errors import ConfigError, TrainerError
from hocket.trainer import attention
from hocket.trainer.batching import pack
from hocket.trainer.policy import Policy
from hocket.types import TokenSequence, TrainSample

CPU = torch.device("cpu")


def make_policy(path: str, **options: object) -> Policy:
    config = ModelConfig(path=path, random_init=bool(options.pop("random_init", False)))
    settings = {"temperature": 0.7, "chunk_tokens": 16} | options
    return Policy(config, dtype=torch.float32, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    rng = random.Random(1)
    made = []
    for _ in range(17):
        length, prompt = rng.randint(4, 24), rng.randint(1, 3)
        mask = tuple(index >= prompt and rng.random() < 0.9 for index in range(length))
        advantage = rng.gauss(0, 1)
        made.append(
            TrainSample(
                sequence=TokenSequence(
                    token_ids=tuple(rng.randrange(62) for _ in range(length)),
                    mask=mask,
                    logprobs=tuple(-4 * rng.random() if m else 0.0 for m in mask),
                ),
                advantages=tuple(advantage if m else 0.0 for m in mask),
            )
        )
    return made


def test_packed_logprobs_equal_those_of_each_sequence_alone(tied_model: str, samples: list[TrainSample]) -> None:
    policy = make_policy(tied_model)
    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32).eval()
    [[batch]] = pack(samples, micro_batch_tokens=1000, num_ranks=1)
    assert len(batch.segment_lengths) == 17
    with torch.no_grad():
        logprobs_bt, entropy_bt = policy(batch)

    alone: dict[tuple[int, ...], float] = {}
    for sample in samples:
        ids = torch.tensor([sample.sequence.token_ids])
        with torch.no_grad():
            full = torch.log_softmax(model(ids).logits[0, :-1] / 0.7, dim=-1)
        for t, (target, trained) in enumerate(
            zip(sample.sequence.token_ids[1:], sample.sequence.mask[1:], strict=True)
        ):
            if trained:
                alone[sample.sequence.token_ids[: t + 2]] = float(full[t, target])
    packed = {}
    for row in range(len(batch.input_ids_bt)):
        for t in range(batch.input_ids_bt.shape[1]):
            if batch.mask_bt[row, t]:
                start = t - int(batch.position_ids_bt[row, t])
                prefix = (*batch.input_ids_bt[row, start : t + 1].tolist(), int(batch.target_ids_bt[row, t]))
                packed[prefix] = float(logprobs_bt[row, t])
    assert packed.keys() == alone.keys()
    for prefix, value in packed.items():
        assert value == pytest.approx(alone[prefix], abs=1e-5)
    assert (entropy_bt[batch.mask_bt] > 0).all()


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
            logprobs_bt, entropy_bt = policy(batch)
            output = policy_loss(
                logprobs_bt,
                batch.rollout_logprobs_bt,
                batch.advantages_bt,
                batch.mask_bt,
                config=config,
                num_tokens=batch.num_tokens_global,
                num_sequences=batch.num_sequences_global,
                entropy_bt=entropy_bt,
                sample_bt=batch.sample_bt,
            )
            output.loss.backward()
            total += output.loss.item()
    return total, [p.grad.clone() for p in policy.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(),
        LossConfig.preset("gspo"),
        LossConfig(
            correction="sequence_mask", correction_low=0.0, correction_high=0.05, aggregate="seq_mean_token_sum"
        ),
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
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        for grad, expected in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad, expected, atol=1e-5, rtol=1e-4)


def test_gradient_checkpointing_changes_no_gradient(tied_model: str, samples: list[TrainSample]) -> None:
    loss, grads = loss_and_gradient(make_policy(tied_model), samples, 100, 1)
    again, others = loss_and_gradient(make_policy(tied_model, gradient_checkpointing=True), samples, 100, 1)
    assert again == pytest.approx(loss, abs=1e-7)
    for grad, other in zip(grads, others, strict=True):
        torch.testing.assert_close(grad, other)


def test_a_float32_head_computes_logits_in_float32_whatever_the_dtype(
    tied_model: str, samples: list[TrainSample]
) -> None:
    [[batch]] = pack(samples, micro_batch_tokens=1000, num_ranks=1)
    found = {}
    for exact in (False, True):
        config = ModelConfig(path=tied_model, float32_head=exact)
        policy = Policy(config, dtype=torch.bfloat16, temperature=0.7, chunk_tokens=16)
        hidden = policy._hidden(batch.input_ids_bt, batch.position_ids_bt, batch.segment_lengths)
        logits = hidden.double() @ policy.model.lm_head.weight.double().T / 0.7
        expected = logits.log_softmax(-1).gather(-1, batch.target_ids_bt[..., None]).squeeze(-1)
        with torch.autocast("cpu", torch.bfloat16, enabled=exact):  # ZeRO-0 computes so; the head stays out of it
            logprobs, _ = policy(batch)
        found[exact] = (logprobs - expected)[batch.mask_bt].abs().max().item()
        logprobs.sum().backward()
        assert policy.model.lm_head.weight.grad.dtype == torch.bfloat16
    assert found[True] < 1e-4 < 1e-3 < found[False]


def test_random_weights_depend_on_the_seed_only(tied_model: str) -> None:
    first, again, other = (make_policy(tied_model, random_init=True, seed=seed) for seed in (1, 1, 2))
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.ndim > 1:
            assert not torch.equal(a, c)


def test_a_missing_model_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"model\.path=/nowhere"):
        make_policy("/nowhere")


def test_an_architecture_that_caps_its_logits_is_refused(tied_model: str) -> None:
    policy = make_policy(tied_model)
    policy.check_architecture(CPU)
    original = policy.model.forward

    def capped(**kwargs: object) -> object:
        output = original(**kwargs)
        output.logits = torch.tanh(output.logits)
        return output

    policy.model.forward = capped
    with pytest.raises(TrainerError, match="changes its logits"):
        policy.check_architecture(CPU)


def test_an_architecture_that_mixes_packed_sequences_is_refused(
    tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = attention.Segments.of
    monkeypatch.setattr(attention.Segments, "of", lambda lengths, device: original([sum(lengths)], device))
    with pytest.raises(TrainerError, match="share a row"):
        make_policy(tied_model).check_architecture(CPU)
