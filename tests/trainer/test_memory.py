import dataclasses
import gc
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import builders
from tests.trainer.conftest import make_tokenizer
from tests.trainer.counting import peak_bytes
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hocket import config as config_module
from hocket.config import ModelConfig, TrainerConfig
from hocket.errors import ConfigError, TrainerError
from hocket.trainer import memory
from hocket.trainer.engine import BUCKET_ELEMENTS
from hocket.trainer.memory import GIB, Estimate, Model, estimate, fit_micro_batch, largest_micro_batch, together
from hocket.trainer.policy import Policy, skeleton
from hocket.trainer.ranks import Ranks
from hocket.trainer.state import SavedTensors, write_bucket
from hocket.trainer.trainer import Trainer
from hocket.types import TrainSample

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen2 of 2.4 M parameters, in which everything is large beside a page."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    make_tokenizer().save_pretrained(folder)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4}
    Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)
    return str(folder)


def make_trainer(ranks: Ranks, model: str, *settings: str) -> Trainer:
    return Trainer(config_module.load(None, [f"model.path={model}", *settings]), ranks=ranks)


def samples(num_positions: int, largest: int = 65) -> list[TrainSample]:
    """Returns sequences of 65 tokens, all of them sampled, of ids below `largest`."""
    return [builders.sample_of(builders.sequence([t % largest for t in range(65)], 0))] * (num_positions // 64)


def bytes_held() -> int:
    gc.collect()
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and value.device == CPU]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values() if storage.resizable())


def test_sizes_are_read_off_a_model_without_weights(tied_model: str) -> None:
    sizes = Model.of(skeleton(ModelConfig(path=tied_model)), torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tied_model)
    assert sizes == Model(
        num_parameters=sum(p.numel() for p in loaded.parameters()),
        num_trained=sum(p.numel() for p in loaded.parameters()),
        num_layers=2,
        hidden_size=32,
        query_size=32,
        key_size=16,
        inner_size=64,
        vocab_size=64,
        itemsize=2,
    )
    adapted = Model.of(skeleton(ModelConfig(path=tied_model, lora={"rank": 4})), torch.bfloat16)  # type: ignore[arg-type]
    # rank × (inputs + outputs) of q, k, v, o, gate, up and down, in two layers
    assert adapted.num_trained == 2 * 4 * (64 + 48 + 48 + 64 + 96 + 96 + 96)


def test_a_hand_worked_estimate() -> None:
    model = Model(
        num_parameters=1_500_000_000,
        num_trained=1_500_000_000,
        num_layers=28,
        hidden_size=1536,
        query_size=1536,
        key_size=256,
        inner_size=8960,
        vocab_size=151_936,
        itemsize=2,
    )
    config = TrainerConfig(micro_batch_tokens=8192, logprob_chunk_tokens=1024)
    found = estimate(model, config, stage=2, num_ranks=4, offloads=False)
    assert found.weights == 3.0e9
    assert found.optimizer == 12 * 1.5e9 / 4
    assert found.gradients == 2 * 1.5e9 + 4 * 1.5e9 / 4 + 2 * BUCKET_ELEMENTS
    layer = 16 * 1536 + 2 * (3 * 1536 + 2 * 256 + 4 * 8960)
    assert found.activations == 8192 * (28 * layer + 16 * 1536)
    assert found.logits == 12 * 1024 * 151_936
    assert f"{found}".startswith("about 36 GiB per rank: weights 2.79, gradients 4.28, optimizer 4.19, activations")
    less = estimate(
        model, config.model_copy(update={"gradient_checkpointing": True}), stage=3, num_ranks=4, offloads=True
    )
    assert less.weights == 0.75e9
    assert less.optimizer == 0
    assert less.activations == 8192 * (28 * 2 * 1536 + 16 * 1536 + layer)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimated_activations_are_those_of_a_forward_and_backward(
    wide_model: str, dtype: torch.dtype, checkpointing: bool
) -> None:
    policy = Policy(
        ModelConfig(path=wide_model),
        dtype=dtype,
        temperature=1.0,
        chunk_tokens=64,
        gradient_checkpointing=checkpointing,
    )
    ids = torch.arange(1024)[None] % 512
    positions = torch.arange(64).repeat(16)[None]

    def work() -> None:
        policy.zero_grad()
        policy._hidden(ids, positions, [64] * 16).sum().backward()

    work()
    model = Model.of(policy.model, dtype)
    gradients = model.num_parameters * model.itemsize  # are there before, and again at the end
    config = TrainerConfig(micro_batch_tokens=1024, gradient_checkpointing=checkpointing)
    expected = estimate(model, config, stage=1, num_ranks=1, offloads=False).activations
    assert peak_bytes(work) == pytest.approx(expected + (gradients if checkpointing else 0) / 2, rel=0.15)


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (1, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16")]
)
def test_the_estimate_is_what_a_trainer_holds(ranks: Ranks, wide_model: str, stage: int, dtype: str) -> None:
    before = bytes_held()
    settings = (f"model.dtype={dtype}", f"trainer.zero_stage={stage}", "trainer.micro_batch_tokens=1024")
    with make_trainer(ranks, wide_model, *settings) as trainer:
        trainer.step(samples(64))
        held = bytes_held() - before
        used = held + peak_bytes(lambda: trainer.step(samples(2048)))
        config = config_module.load(None, list(settings)).trainer
        model = Model.of(trainer.policy.model, trainer.models.dtype)
        model = dataclasses.replace(model, num_parameters=trainer.num_parameters, num_trained=trainer.num_parameters)
    expected = estimate(model, config, stage=stage, num_ranks=1, offloads=False).total
    assert used == pytest.approx(expected, rel=0.15)


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(
    ranks: Ranks, tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 24 * GIB)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("loaded"))
    settings = ("trainer.micro_batch_tokens=10000000", "trainer.logprob_chunk_tokens=64", "trainer.zero_stage=0")
    with pytest.raises(ConfigError) as refused:
        make_trainer(ranks, tied_model, *settings)
    message = str(refused.value)
    # a layer's 24 · 32 + 4 · (3 · 32 + 2 · 16 + 4 · 64) bytes, twice, and 24 · 32 more, for ten million tokens
    assert "a step needs about 50 GiB per rank: weights 0.00, gradients 0.00, optimizer 0.00, activations 50" in message
    assert "there are 24" in message
    assert "trainer.gradient_checkpointing=true" in message
    assert "trainer.micro_batch_tokens=5000000 (25)" in message
    assert "trainer.offload_optimizer" not in message  # it would not help


def test_models_beside_the_policy_count_by_hand() -> None:
    policy = Estimate(weights=10, gradients=20, optimizer=60, activations=7, logits=3)
    critic = Estimate(weights=11, gradients=22, optimizer=66, activations=9, logits=3)
    frozen = Estimate(weights=5, gradients=10, optimizer=30, activations=4, logits=3)
    # the reference has weights alone; critic and policy run one after the other
    assert together({"policy": policy, "critic": critic, "reference": frozen}) == Estimate(
        weights=26, gradients=42, optimizer=126, activations=9, logits=3
    )
    assert together({"policy": policy}) == policy


def test_frozen_layers_in_four_bits_take_about_half_a_byte_per_weight(tied_model: str) -> None:
    model = skeleton(ModelConfig(path=tied_model, lora={"rank": 4}))  # type: ignore[arg-type]
    found = Model.of(model, torch.bfloat16, quantized=True)
    # hidden 32, query 32, key 16, inner 64: q, o; k, v; gate, up, down in each of two layers
    assert found.num_quantized == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    config = TrainerConfig(zero_stage=2)
    plain = estimate(Model.of(model, torch.bfloat16), config, stage=2, num_ranks=1, offloads=False).weights
    small = estimate(found, config, stage=2, num_ranks=1, offloads=False).weights
    assert plain - small == pytest.approx((2 - 0.53) * found.num_quantized)


def test_the_largest_micro_batch_leaves_a_margin() -> None:
    # 1000 bytes and 20 per token: a tenth of 11111 stays free, and 9000 / 20 fit
    assert largest_micro_batch((100, 3000), (200, 5000), 11_111) == 449
    assert largest_micro_batch((100, 3000), (200, 5000), 0) == 0
    assert largest_micro_batch((100, 3000), (200, 3000), 11_111) == memory.LARGEST_MICRO_BATCH


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rehearsed_step_leaves_no_trace(ranks: Ranks, tied_model: str, stage: int) -> None:
    losses = []
    for rehearsed in (False, True):
        with make_trainer(ranks, tied_model, f"trainer.zero_stage={stage}") as trainer:
            if rehearsed:
                memory.rehearse(trainer.models.learners()[0], 1024, ranks)
            losses += [[trainer.step(samples(512, 62)).loss for _ in range(2)]]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("changed", "goes_on"),
    [
        (("trainer.steps=7",), True),
        (("trainer.gradient_checkpointing=true",), False),
        (("algorithm.kl=k2", "algorithm.kl_coef=0.1"), False),
    ],
)
def test_a_run_that_goes_on_keeps_its_micro_batches_unless_others_may_fit(
    ranks: Ranks,
    tied_model: str,
    changed: tuple[str, ...],
    goes_on: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "fit_micro_batch", lambda learners, config, ranks: 600)
    with make_trainer(ranks, tied_model, "trainer.micro_batch_tokens=auto") as trainer:
        rest = trainer.state(lambda bucket: write_bucket(tmp_path, bucket))
    monkeypatch.setattr(memory, "fit_micro_batch", lambda learners, config, ranks: 500)  # something else takes more
    with make_trainer(ranks, tied_model, "trainer.micro_batch_tokens=auto", *changed) as trainer:
        assert trainer.micro_batch_tokens == 500
        trainer.restore(SavedTensors(tmp_path), json.loads(json.dumps(rest)))
        expected = 600 if goes_on else 500
        assert trainer.micro_batch_tokens == expected
        assert trainer.memory.endswith(f"trainer.micro_batch_tokens=auto is {expected}")
    with make_trainer(ranks, tied_model, "trainer.micro_batch_tokens=50") as trainer:
        trainer.restore(SavedTensors(tmp_path), rest)
        assert trainer.micro_batch_tokens == 50


def test_auto_is_the_default_on_a_cpu(ranks: Ranks, tied_model: str) -> None:
    with make_trainer(ranks, tied_model, "trainer.micro_batch_tokens=auto") as trainer:
        assert trainer.micro_batch_tokens == TrainerConfig().micro_batch_tokens


def gpu_with(free: int, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Stands for the ranks of a GPU on which micro-batches take 1000 bytes and 20 per token."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)
    monkeypatch.setattr(memory, "rehearse", lambda learner, num_positions, ranks: None)
    monkeypatch.setattr(memory, "_peak_bytes", lambda learner, num_positions, ranks: 1000 + 20 * num_positions)
    return types.SimpleNamespace(device=torch.device("cuda"), smallest=lambda tokens: tokens)  # type: ignore[return-value]


def learner_of(bytes_to_come: int) -> Any:
    return types.SimpleNamespace(engine=types.SimpleNamespace(bytes_to_come=lambda: bytes_to_come))


def test_auto_leaves_room_for_the_moments_of_every_model_that_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    learners = [learner_of(3000), learner_of(1000)]
    assert fit_micro_batch(learners, TrainerConfig(), gpu_with(11_111 + 4000, monkeypatch)) == 449


def test_auto_with_no_room_at_all_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainerError, match=r"not even one sequence.*gradient_checkpointing"):
        fit_micro_batch([learner_of(0)], TrainerConfig(), gpu_with(0, monkeypatch))


def test_ranks_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.system.free_memory", lambda: 12 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.available_bytes(CPU) == 3 * GIB
