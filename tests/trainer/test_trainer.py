import dataclasses
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hocket import config as config_module
from hocket import tokenizer as tokenizers
from hocket.errors import ConfigError, TrainerError
from hocket.protocol import Health
from hocket.trainer.ranks import Ranks
from hocket.trainer.trainer import Trainer
from hocket.types import TrainSample

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(timeout_s=60)
    yield ranks
    ranks.close()


def make_trainer(ranks: Ranks, model: str, *settings: str) -> Trainer:
    defaults = ("model.dtype=float32", "trainer.learning_rate=1e-3", "trainer.micro_batch_tokens=40")
    return Trainer(config_module.load(None, [*defaults, f"model.path={model}", *settings]), ranks=ranks)


def make_samples(count: int = 5) -> list[TrainSample]:
    rng = random.Random(count)
    return [
        TrainSample(
            token_ids=tuple(rng.randrange(62) for _ in range(9)),
            mask=(False, False, *[True] * 7),
            rollout_logprobs=(0.0, 0.0, *[-3.0] * 7),
            advantage=rng.gauss(0, 1),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["tied_model", "untied_model"])
def test_an_exported_model_loads_anywhere_with_the_trained_weights(
    ranks: Ranks, model: str, stage: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    ids = torch.arange(12)[None]
    with make_trainer(ranks, path, f"trainer.zero_stage={stage}") as trainer:
        trainer.step(make_samples())
        trainer.export(tmp_path / "model")
        with torch.no_grad():
            expected = trainer._policy.model(ids).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").eval()
    start = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, expected, atol=1e-6, rtol=0)
        assert not torch.allclose(start(ids).logits, expected, atol=1e-3)
    names = load_file(tmp_path / "model" / "model.safetensors").keys()
    assert ("lm_head.weight" in names) == (model == "untied_model")
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 1  # whoever may read the config may read the weights
    assert tokenizers.fingerprint(AutoTokenizer.from_pretrained(tmp_path / "model")) == tokenizers.fingerprint(
        trainer.tokenizer
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_training_follows_float32_and_exports_bfloat16(
    ranks: Ranks, tied_model: str, stage: int, tmp_path: Path
) -> None:
    stats = {}
    for dtype in ("float32", "bfloat16"):
        settings = (f"model.dtype={dtype}", f"trainer.zero_stage={stage}")
        with make_trainer(ranks, tied_model, *settings) as trainer:
            stats[dtype] = [trainer.step(make_samples()) for _ in range(4)]
            trainer.export(tmp_path / dtype)
    for half, full in zip(stats["bfloat16"], stats["float32"], strict=True):
        assert half.loss == pytest.approx(full.loss, abs=0.02)
        assert half.grad_norm == pytest.approx(full.grad_norm, rel=0.05)
    tensors = load_file(tmp_path / "bfloat16" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_master_weights_keep_updates_that_16_bits_would_lose(ranks: Ranks, tied_model: str) -> None:
    # A change of 2e-5 per step is lost in bfloat16 numbers near 0.2, whose neighbours are 1e-3 apart.
    settings = ("model.dtype=bfloat16", "trainer.learning_rate=2e-5")
    with make_trainer(ranks, tied_model, *settings) as trainer:
        before = [p.detach().clone() for p in trainer._policy.parameters()]
        for _ in range(60):
            trainer.step(make_samples())
        moved = [
            ((p.detach() - b).abs() > 0).float().mean()
            for p, b in zip(trainer._policy.parameters(), before, strict=True)
        ]
    assert max(moved) > 0.3


def test_loss_falls_when_the_same_samples_are_rewarded_again_and_again(ranks: Ranks, tied_model: str) -> None:
    samples = [dataclasses.replace(sample, advantage=1.0) for sample in make_samples()]
    with make_trainer(ranks, tied_model, "algorithm.correction=none", "algorithm.clip_high=1e6") as trainer:
        stats = [trainer.step(samples) for _ in range(20)]
    assert stats[-1].metrics["ratio_mean"] > 3 * stats[0].metrics["ratio_mean"]
    assert stats[0].num_tokens == 35
    assert stats[0].num_sequences == 5
    assert stats[0].seconds > 0


def test_nothing_to_train_on_is_refused_and_the_trainer_goes_on(ranks: Ranks, tied_model: str) -> None:
    with make_trainer(ranks, tied_model) as trainer:
        with pytest.raises(TrainerError, match="nothing to train on"):
            trainer.step([])
        assert not trainer.step(make_samples()).skipped


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_too_many_skipped_steps_in_a_row_end_the_run_with_names(ranks: Ranks, tied_model: str, stage: int) -> None:
    bad = [dataclasses.replace(make_samples()[0], advantage=math.inf)]
    settings = (f"trainer.zero_stage={stage}", "trainer.max_skipped_steps=2")
    with make_trainer(ranks, tied_model, *settings) as trainer:
        assert trainer.step(bad).skipped
        assert not trainer.step(make_samples()).skipped
        stats = trainer.step(bad)
        assert stats.skipped
        assert math.isnan(stats.grad_norm)
        with pytest.raises(TrainerError, match=r"2 steps in a row.*embed_tokens\.weight"):
            trainer.step(bad)


def test_a_closed_trainer_says_so(ranks: Ranks, tied_model: str) -> None:
    trainer = make_trainer(ranks, tied_model)
    trainer.close()
    trainer.close()
    with pytest.raises(TrainerError, match="closed"):
        trainer.step(make_samples())


def test_a_checkpoint_is_neither_overwritten_nor_read_in_part(ranks: Ranks, tied_model: str, tmp_path: Path) -> None:
    with make_trainer(ranks, tied_model) as trainer:
        trainer.save(tmp_path / "checkpoint")
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
        with pytest.raises(TrainerError, match="exists already"):
            trainer.save(tmp_path / "checkpoint")
        (tmp_path / "checkpoint" / "COMPLETE").unlink()
        with pytest.raises(TrainerError, match="not a complete checkpoint"):
            trainer.load(tmp_path / "checkpoint")


def test_a_checkpoint_of_another_zero_stage_is_refused(ranks: Ranks, tied_model: str, tmp_path: Path) -> None:
    with make_trainer(ranks, tied_model, "trainer.zero_stage=1") as trainer:
        trainer.save(tmp_path / "checkpoint")
    with (
        make_trainer(ranks, tied_model, "trainer.zero_stage=2") as trainer,
        pytest.raises(TrainerError, match=r"stage 1.*stage 2"),
    ):
        trainer.load(tmp_path / "checkpoint")


def test_a_server_with_another_model_is_refused(ranks: Ranks, tied_model: str) -> None:
    with make_trainer(ranks, tied_model) as trainer:
        health = Health(
            status="ready",
            version=0,
            model="m",
            dtype="float32",
            vocab_size=64,
            max_length=64,
            tokenizer_sha256=tokenizers.fingerprint(trainer.tokenizer),
            session="s",
            in_flight=0,
            root="/",
            device="cpu",
            workers=1,
        )
        trainer.check_same_model(health)
        for change in ({"vocab_size": 65}, {"tokenizer_sha256": "0"}):
            with pytest.raises(TrainerError, match=r"model\.path"):
                trainer.check_same_model(health.model_copy(update=change))


def test_float16_on_a_cpu_is_refused(ranks: Ranks, tied_model: str) -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        make_trainer(ranks, tied_model, "model.dtype=float16")
