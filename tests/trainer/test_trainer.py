import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hocket.algorithm.losses import LossOutput
from hocket.config import TrainerConfig, load
from hocket.errors import ConfigError, ServerError, TrainerError
from hocket.protocol import manifest, nccl
from hocket.trainer import objective
from hocket.trainer import trainer as trainer_module
from hocket.trainer.batching import TrainBatch
from hocket.trainer.engine import Setup, default_zero_stage
from hocket.trainer.objective import Objective
from hocket.trainer.ranks import FAILURE, Ranks
from hocket.trainer.trainer import Trainer
from support import training
from support.examples import shown
from support.numbers import rounding
from support.training import additions, make_rollouts, make_samples, make_trainer, same, untimed, weights_of

# Each of 17 products on the way to a log-prob is rounded to 16 bits, and of 51 to a gradient; one side is as good as
# exact, so half of what two would lie apart.
HALF = {"train/loss": rounding(17, torch.bfloat16) / 2, "train/grad_norm": rounding(3 * 17, torch.bfloat16) / 2}


@pytest.fixture(scope="module")
def trainer(ranks: Ranks, tied_model: str) -> Iterator[Trainer]:
    """A trainer for all tests that leave it able to go on, in the end with one more step."""
    with make_trainer(ranks, tied_model) as trainer:
        yield trainer
        assert not trainer.step(make_samples())["train/skipped"]


def test_the_example_of_the_documentation_takes_an_update_and_writes_the_model(
    ranks: Ranks, tied_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "Trainer": functools.partial(Trainer, ranks=ranks),  # which other tests go on with
        "Path": Path,
        "config": load(None, ["model.dtype=float32", f"model.path={tied_model}"]),
        "samples": make_samples(),
    }
    exec(shown(trainer_module, "with Trainer(config) as trainer:"), names)
    assert names["metrics"]["train/updates"] == 1
    before = AutoModelForCausalLM.from_pretrained(tied_model).state_dict()
    after = AutoModelForCausalLM.from_pretrained("my-model").state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_example_of_an_objective_raises_the_log_probs_of_sampled_tokens(ranks: Ranks, tied_model: str) -> None:
    samples = make_samples()
    names: dict[str, Any] = {
        "Trainer": functools.partial(Trainer, ranks=ranks),
        "Objective": Objective,
        "LossOutput": LossOutput,
        "TrainBatch": TrainBatch,
        "Tensor": torch.Tensor,
        "config": load(None, ["model.dtype=float32", f"model.path={tied_model}", "trainer.learning_rate=1e-3"]),
    }
    exec(shown(objective, "def loss("), names)
    with names["trainer"] as trainer:
        sums = [math.fsum(map(sum, trainer.logprobs(samples)))]
        trainer.step(samples)
        sums.append(math.fsum(map(sum, trainer.logprobs(samples))))
    assert sums[1] > sums[0]


def test_bfloat16_training_follows_float32(ranks: Ranks, tied_model: str) -> None:
    stats = {}
    # ZeRO-0 casts by itself, ZeRO-1 and -2 have DeepSpeed's optimizer for 16 bits, and ZeRO-3 has one of its own.
    for dtype, stage in (("float32", 0), ("bfloat16", 0), ("bfloat16", 1), ("bfloat16", 3)):
        with make_trainer(ranks, tied_model, f"model.dtype={dtype}", f"trainer.zero_stage={stage}") as trainer:
            stats[dtype, stage] = [trainer.step(make_samples()) for _ in range(4)]
    expected = stats.pop(("float32", 0))
    for half, full in zip(chain(*stats.values()), expected * 3, strict=True):
        for name, apart in HALF.items():
            assert half[name] == pytest.approx(full[name], rel=apart, abs=apart)


def test_master_weights_keep_updates_that_16_bits_would_lose(ranks: Ranks, tied_model: str) -> None:
    # A change of 1e-4 per step is lost in bfloat16 numbers near 0.2, whose neighbours are 1e-3 apart.
    settings = ("model.dtype=bfloat16", "trainer.learning_rate=1e-4")
    with make_trainer(ranks, tied_model, *settings) as trainer:
        before = weights_of(trainer)
        for _ in range(12):
            trainer.step(make_samples())
        moved = [(tensor != before[name]).float().mean() for name, tensor in weights_of(trainer).items()]
    assert max(moved) > 0.3


@pytest.mark.parametrize("stage", [2, 3])  # ZeRO-1 is ZeRO-2's class; in float32 the matrix of test_ranks.py has them
def test_with_the_optimizer_offloaded_training_goes_on_after_a_skipped_step(
    ranks: Ranks, tied_model: str, stage: int
) -> None:
    bad = [dataclasses.replace(make_samples()[0], advantages=(0.0, 0.0, *[math.nan] * 7))]
    stats = {}
    for offloaded in ("false", "true"):
        settings = (f"trainer.zero_stage={stage}", "model.dtype=bfloat16", f"trainer.offload_optimizer={offloaded}")
        with make_trainer(ranks, tied_model, *settings) as trainer:
            steps = [make_samples(), make_samples(), bad, make_samples(), make_samples()]
            stats[offloaded] = [trainer.step(samples) for samples in steps]
    assert [step["train/skipped"] for step in stats["true"]] == [False, False, True, False, False]
    for step, other in zip(stats["true"], stats["false"], strict=True):
        # A weight or two may be rounded to another of its neighbours in 16 bits, which are 2^-8 apart.
        assert step["train/skipped"] or untimed(step) == pytest.approx(untimed(other), abs=2**-8, rel=2**-8)
    assert abs(stats["true"][-1]["train/loss"] - stats["true"][0]["train/loss"]) > 1e-2  # it does train


def test_float16_on_a_cpu_or_at_zero_0_is_refused(ranks: Ranks, tied_model: str) -> None:
    with pytest.raises(ConfigError, match=r"on GPUs alone, .* or model\.dtype=bfloat16"):
        make_trainer(ranks, tied_model, "model.dtype=float16")

    def on_gpu(stage: int | None) -> Setup:
        gpu: Any = Mock(size=1, device=torch.device("cuda"))
        return Setup(config=TrainerConfig(zero_stage=stage), dtype=torch.float16, ranks=gpu)

    with pytest.raises(ConfigError, match=r"with trainer\.zero_stage=1, 2 or 3: set that"):
        on_gpu(0).parameter_dtype()
    assert on_gpu(1).parameter_dtype() == on_gpu(None).parameter_dtype() == torch.float16


def stream(trainer: Trainer, max_bytes: int) -> list[list[tuple[str, torch.Tensor]]]:
    """Returns copies of all buckets: each holds only until the next one."""
    buckets: list[list[tuple[str, torch.Tensor]]] = []
    trainer.stream(max_bytes, lambda bucket: buckets.append([(name, tensor.clone()) for name, tensor in bucket]))
    return buckets


@pytest.mark.parametrize(
    ("model", "dtype"), [("tied_model", "float32"), ("untied_model", "bfloat16"), ("experts_model", "bfloat16")]
)
def test_layout_stream_and_an_export_in_several_files_are_the_same_tensors(
    ranks: Ranks, model: str, dtype: str, tmp_path: Path, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_small_files = functools.partial(save_torch_state_dict, max_shard_size=8192)
    monkeypatch.setattr("hocket.trainer.weights.save_torch_state_dict", in_small_files)
    path = request.getfixturevalue(model)
    with make_trainer(ranks, path, f"model.dtype={dtype}") as trainer:
        trainer.step(make_samples())
        streams = {max_bytes: stream(trainer, max_bytes) for max_bytes in (1, 4096, 1 << 30)}
        for max_bytes, buckets in streams.items():
            assert [nccl.layout(bucket) for bucket in buckets] == trainer.layout(max_bytes)
        specs = trainer.export(tmp_path)
    files = list(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(files) > 2
    size = getattr(torch, dtype).itemsize
    assert sum(path.stat().st_size for path in files) < size * trainer.num_parameters + 4096 * len(files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert (loaded.num_parameters(), loaded.dtype) == (trainer.num_parameters, getattr(torch, dtype))
    written = {name: tensor.clone() for name, tensor in manifest.tensors(tmp_path)}
    assert written.keys() == load_file(Path(path) / "model.safetensors").keys()
    for max_bytes, buckets in streams.items():
        streamed = dict(chain(*buckets))
        assert specs == manifest.specs(streamed.items())
        assert len(streamed) == sum(map(len, buckets))  # each tensor once
        assert same(streamed, written)
        assert {tensor.dtype for tensor in streamed.values()} == {getattr(torch, dtype)}
        assert ("lm_head.weight" in streamed) == (model != "tied_model")
        assert max_bytes < 1 << 30 or len(buckets) == 1
        if model != "experts_model":  # whose parameters in memory hold all experts of a layer
            sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets]
            assert all(size <= max_bytes or len(bucket) == 1 for size, bucket in zip(sizes, buckets, strict=True))


# By stage another optimizer, by dtype another copy of the weights; test_ranks.py has every stage in float32.
@pytest.mark.parametrize(("stage", "dtype"), [(0, "bfloat16"), (1, "bfloat16"), (2, "float32"), (3, "bfloat16")])
def test_in_another_thread_off_the_device_between_steps_and_resumed_all_is_the_same_to_the_last_bit(
    ranks: Ranks, untied_model: str, stage: int, dtype: str, tmp_path: Path
) -> None:
    settings = (f"trainer.zero_stage={stage}", f"model.dtype={dtype}", "algorithm.kl=k2", "algorithm.kl_coef=0.1")

    def work(leaves: bool) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        samples = training.measured(trainer, make_samples())
        steps = []
        for _ in range(3):
            if leaves:
                trainer.offload()
                trainer.offload()
                for refused in (lambda: trainer.step(samples), lambda: trainer.export(tmp_path)):
                    with pytest.raises(TrainerError, match="off the GPU"):
                        refused()
                trainer.onload()
            steps.append(untimed(trainer.step(samples)))
        return steps, weights_of(trainer)

    with make_trainer(ranks, untied_model, *settings) as trainer, ThreadPoolExecutor(1) as thread:
        trainer.onload()  # it is there already
        start = weights_of(trainer)
        training.save(trainer, tmp_path / "state")
        steps, tensors = work(leaves=False)
        training.load(trainer, tmp_path / "state")
        same_steps, same_tensors = thread.submit(work, leaves=True).result(60)
        trainer.offload()  # it can be closed so
    trainer.close()
    with pytest.raises(TrainerError, match="closed"):
        trainer.step(make_samples())
    assert steps == same_steps
    assert same(tensors, same_tensors)
    assert not same(tensors, start)


def test_every_thread_computes_on_as_many_cores_as_the_ranks_agreed_on(trainer: Trainer) -> None:
    cores = torch.get_num_threads()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(torch.set_num_threads, cores + 1).result(60)
        seen: list[int] = []
        thread.submit(trainer.stream, 1 << 30, lambda bucket: seen.append(torch.get_num_threads())).result(60)
    assert seen == [cores]


def test_a_trainer_computes_with_the_threads_of_its_share_unless_the_user_set_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(dist, "init_process_group", fail := Mock(side_effect=ValueError("far enough")))
    with pytest.raises(ValueError, match="far enough"):
        Ranks(timeout_s=60, cpu_threads=5)
    monkeypatch.delenv("OMP_NUM_THREADS")  # which is for all tests
    with pytest.raises(ValueError, match="far enough"):
        Ranks(timeout_s=60, cpu_threads=5)
    assert fail.call_count == 2
    assert chosen.count(5) == 1


@pytest.mark.parametrize(
    ("settings", "dtype", "stages"),
    [
        ({}, torch.float32, (0, 0)),  # it has nothing to share, and no second copy of its weights
        ({"offload_optimizer": True}, torch.float32, (1, 3)),  # at stage 3 alone gradients leave the GPU, too
        ({}, torch.bfloat16, (1, 2)),
        ({"zero_stage": 3}, torch.bfloat16, (3, 3)),
    ],
)
def test_one_rank_shares_only_what_it_has_twice(
    settings: dict[str, Any], dtype: torch.dtype, stages: tuple[int, int]
) -> None:
    for on_gpu in (False, True):
        assert default_zero_stage(TrainerConfig(**settings), dtype, num_ranks=1, on_gpu=on_gpu) == stages[on_gpu]


def test_the_log_probs_of_samples_are_those_of_transformers_in_the_order_of_the_samples(
    trainer: Trainer, tied_model: str, tmp_path: Path
) -> None:
    rollouts = make_rollouts(4, longest=30, seed=3)
    trainer.export(tmp_path)
    expected = training.logprobs_of(tmp_path, rollouts)
    before = weights_of(trainer)
    found = trainer.logprobs([training.sample_of(rollout, 0.0) for rollout in rollouts])
    for own, row in zip(found, expected, strict=True):
        training.assert_near(own, row, additions(tied_model))
    for work in (trainer.logprobs, trainer.step):
        with pytest.raises(TrainerError, match="nothing to train on"):
            work([])
    assert same(before, weights_of(trainer))


def test_the_gap_of_samples_is_the_mean_over_their_sampled_tokens(
    trainer: Trainer, tied_model: str, tmp_path: Path
) -> None:
    rollouts = make_rollouts(4, longest=30, seed=3)
    trainer.export(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    gaps: list[float] = []
    for rollout in rollouts:
        ids, mask = torch.tensor(rollout.token_ids), torch.tensor(rollout.mask)
        with torch.no_grad():
            rows = model(ids[None]).logits[0, :-1].log_softmax(-1)[mask[1:]]
        own = rows.gather(-1, ids[1:][mask[1:], None])[:, 0]
        gaps += (own - torch.tensor(rollout.logprobs)[mask]).abs().tolist()
    gap, _ = trainer.compare([training.sample_of(rollout, 0.0) for rollout in rollouts])
    one = rounding(additions(tied_model)) * 5  # of a log-prob, which is about 5
    assert gap == pytest.approx(statistics.fmean(gaps), abs=one)


def test_a_disk_that_is_full_while_exporting_leaves_the_trainer_able_to_go_on(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        full = Mock(side_effect=OSError(28, "No space left on device"))
        patch.setattr("hocket.trainer.weights.save_torch_state_dict", full)
        with pytest.raises(OSError, match="No space left"):
            trainer.export(tmp_path / "model")
    trainer.export(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_an_entropy_bonus_alone_moves_the_policy(ranks: Ranks, tied_model: str) -> None:
    samples = [dataclasses.replace(sample, advantages=(0.0,) * 9) for sample in make_samples()]
    with make_trainer(ranks, tied_model, "algorithm.entropy_coef=0.1") as trainer:
        first, *_, last = (trainer.step(samples)["train/entropy"] for _ in range(10))
    assert last - first > 0.1


def test_what_ends_a_run_is_not_hidden_by_ranks_that_can_not_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "close", Mock(side_effect=TrainerError("the other ranks are lost")))
    with pytest.raises(ServerError, match="the cause"), object.__new__(Trainer):
        raise ServerError("the cause", code="timeout")
    with pytest.raises(TrainerError, match="the other ranks are lost"), object.__new__(Trainer):
        pass


def test_a_rank_that_is_started_again_tells_those_that_wait_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]  # of the launcher, which has outlived the first one
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 1, 2)]))
    store.add("hocket/rank_1", 1)
    with pytest.raises(TrainerError, match="started again"):
        Ranks(timeout_s=60)
    assert b"rank 1 was started again" in store.get(FAILURE)


def test_a_store_that_fails_at_once_is_not_waited_for(ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match="it is gone"):
        ranks._ask_store(Mock(side_effect=OSError("it is gone")), 600)


def test_weights_that_no_gradient_reaches_do_not_hide_the_updates_of_others(ranks: Ranks, untied_model: str) -> None:
    with make_trainer(ranks, untied_model) as trainer:
        first = trainer.policy.model.model.embed_tokens
        first.register_forward_hook(lambda module, inputs, output: output.detach())
        trainer.step(make_samples())
        assert trainer.engine.counters()["updates"] == 1


def test_more_ranks_than_gpus_are_refused_with_what_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(TrainerError, match=r"LOCAL_RANK=2.*GPUs for 2, one each: start 2 ranks here"):
        Ranks(timeout_s=60)
