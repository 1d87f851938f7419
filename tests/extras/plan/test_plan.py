"""The plan of a run: what fits where, held against public sizes, and against a table that must not change unnoticed."""

import csv
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen2Config

from hocket.config import load
from hocket.errors import ConfigError
from hocket.extras.plan import plan
from hocket.extras.stages import staged
from hocket.trainer import objective
from hocket.trainer.memory import GIB

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).with_name("plan.csv")
SIZES = {  # of Qwen2.5: hidden size, inner size, layers, heads, heads of keys, vocabulary; whether the head is tied
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "14B": (5120, 13_824, 48, 40, 8, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
}
OF_TABLE = ("0.5B", "1.5B", "7B", "14B", "32B")
MODES = {
    "full": [],
    "offload": ["trainer.offload_optimizer=true"],
    "lora": ["model.lora={}"],
    "qlora": ["model.lora={quantize: nf4}"],
}
COMMON = ["model.max_length=4096", "trainer.gradient_checkpointing=true", "rollout.max_tokens=1024"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with nothing but a config.json."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    folders = {}
    for size, numbers in SIZES.items():
        folders[size] = str(tmp_path_factory.mktemp(size))
        values: dict[str, Any] = dict(zip((*names, "vocab_size", "tie_word_embeddings"), numbers, strict=True))
        Qwen2Config(**values, architectures=["Qwen2ForCausalLM"]).save_pretrained(folders[size])
    return folders


def needs(model: str, *settings: str, gpus: int = 2, card: str = "80GB") -> plan.Needs:
    """Returns what a run needs on so many GPUs of a size."""
    return plan.Needs(load(None, [f"model.path={model}", *COMMON, *settings]), gpus, plan.GPUS[card])


def row(model: str, size: str, mode: str, card: str) -> dict[str, str]:
    """Returns a line of the table: one server and one trainer rank, a GPU of this size for each."""
    found = needs(model, *MODES[mode], card=card)
    numbers = {
        "rank_gib": f"{found.rank.total / GIB:.1f}",
        "micro_batch_tokens": str(found.largest_micro_batch),
        "kv_tokens": str(found.kv_tokens),
        "fits": "yes" if found.fits else "no",
    }
    seconds = {f"{name}_s": f"{found.seconds[name]:.1f}" if found.fits else "" for name in ("generate", "train")}
    return {"model": size, "mode": mode, "gpu": card, **numbers, **seconds}


@pytest.mark.long
def test_what_fits_on_which_gpu_is_what_the_table_says(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}  # a model without weights takes a second, and all GPUs have the same

    def once(config: Any, *_: Any) -> Any:
        return made.setdefault(f"{config}", skeleton(config))

    skeleton = objective.skeleton
    monkeypatch.setattr(objective, "skeleton", lambda config, *_: made.get(f"{config}") or once(config))
    rows = [row(models[size], size, mode, card) for size, mode, card in itertools.product(OF_TABLE, MODES, plan.GPUS)]
    with GOLDEN.open(encoding="utf-8") as file:
        assert rows == list(csv.DictReader(file))


def test_a_plan_has_the_sizes_that_are_published_and_the_seconds_worked_out_by_hand(models: dict[str, str]) -> None:
    settings = (models["7B"], "launch.servers=4", "server.gpu_memory_utilization=0.9", "sync.backend=disk")
    found = needs(*settings, gpus=8)
    assert needs(*settings, "server.engine.max_num_seqs=null", gpus=8).seconds == found.seconds
    assert found.parameters == 7_615_616_512
    assert (found.where.servers, found.where.ranks) == (["0", "1", "2", "3"], "4,5,6,7")
    # keys and values, 28 layers of 4 heads of 128 in bfloat16: 57,344 bytes per token; 2.5 GiB are vLLM's own
    assert found.kv_tokens == int((0.9 * 79 * 2**30 - 2 * 7_615_616_512 - 2.5 * 2**30) / 57_344)
    assert found.sequences == found.kv_tokens // 4096
    # 15.2 GB by disk: 2.5 s to the CPU, 7.2 written, 6.1 on the disk, 1.4 checked, 7.3 loaded. 91 GB of state. Each of
    # these figures is rounded by 0.05 at most.
    assert found.seconds["weights"] == pytest.approx(2.5 + 7.2 + 6.1 + 1.4 + 7.3, abs=5 * 0.05)
    assert found.seconds["checkpoint"] == pytest.approx(91.4, abs=0.05)
    with_critic = needs(*settings, "algorithm.preset=ppo", gpus=8)
    assert with_critic.trained > 1.9 * found.trained
    assert with_critic.published == found.published == 2 * 7_615_616_512  # the servers get no critic
    # 128 rollouts of 512 tokens behind 16 prompts of 256, each computed once; the head over the 512: 6 operations per
    # weight and token, a third more recomputed, at 40 % of 989e12/s on 4 GPUs. Attention has 12 operations for each
    # token, one that it sees, and value of the 28 layers' queries. Norms, biases, and that a token sees itself, are
    # below 1e-4 of all.
    positions = 16 * 256 + 128 * 512
    products = 6 * (positions * (7_615_616_512 - 2 * 152_064 * 3584) + 128 * 512 * 152_064 * 3584)
    products += 12 * 28 * 3584 * (16 * 256**2 / 2 + 128 * (512 * 256 + 512**2 / 2))
    assert found.seconds["train"] == pytest.approx(products * 4 / 3 / (4 * 0.4 * 989e12), rel=1e-4)


def test_the_machines_memory_and_the_seconds_of_an_offloaded_update_are_those_worked_out_by_hand(
    models: dict[str, str],
) -> None:
    settings = [models["7B"], *MODES["offload"], "trainer.micro_batch_tokens=16384"]
    settings += ["sync.backend=disk", "checkpoint.async=true", "algorithm.minibatches=2"]
    found = needs(*settings)
    # 7.6156 billion parameters: 122 GB master weights, moments and the update's gradients, 30 GB their sums; a version
    # in 16 bits; a copy of the checkpoint while it is written; a server and a rank of 3 GiB each.
    assert {name: round(size / 1e9, 1) for name, size in found.host.items()} == {
        "processes": 6.4,
        "offloaded": 152.3,
        "version": 15.2,
        "checkpoint": 91.4,
    }
    # Two updates of 2.13 s (213 GB at 100 GB/s), each of three micro-batches (half of 69,632 positions), whose sums of
    # 30 GB travel both ways at 25 GB/s, 2.44 s; and twice 15 GB of new weights. Each is rounded by 0.005 at most.
    assert found.seconds["offload"] == pytest.approx(2 * (2.13 + 3 * 2.44 + 0.61), abs=2 * (1 + 3 + 1) * 0.005)
    # Of two ranks each takes two micro-batches with half of the sums, or, where they divide their rows, all three.
    divided = (needs(*settings, f"trainer.sequence_parallel={size}", gpus=4) for size in (1, 2))
    one, two = (each.seconds["offload"] for each in divided)
    assert two - one == pytest.approx(2 * (3 - 2) * 2.44 / 2, abs=0.005)
    found = needs(models["0.5B"], "launch.share_gpu=true", "launch.servers=1", gpus=1)
    state = found.rank.weights + found.rank.gradients + found.rank.optimizer
    assert found.host["while the server generates"] == state
    assert found.host["checkpoint"] == 2**30  # of 6 GB, file by file


@pytest.mark.parametrize(
    ("name", "size", "gpus", "card"),
    [
        ("gsm8k_1gpu", "0.5B", 1, "24GB"),
        ("lora_7b_24gb", "7B", 1, "24GB"),
        ("share_1gpu_80gb", "3B", 1, "80GB"),
        ("one_node_8gpu_7b", "7B", 8, "80GB"),
    ],
)
def test_a_shipped_config_fits_the_gpus_that_it_is_for(
    name: str, size: str, gpus: int, card: str, models: dict[str, str]
) -> None:
    config = load(ROOT / "config" / f"{name}.yaml", [])
    assert size in config.model.path
    found = plan.Needs(load(ROOT / "config" / f"{name}.yaml", [f"model.path={models[size]}"]), gpus, plan.GPUS[card])
    assert found.fits
    assert found.largest_micro_batch >= config.trainer.micro_batch_tokens
    assert found.kv_tokens >= 16 * config.model.max_length  # or few sequences are decoded at the same time


def test_a_plan_that_does_not_fit_names_the_least_costly_ways_out(models: dict[str, str]) -> None:
    settings = [f"model.path={models['7B']}", "model.max_length=4096", "trainer.micro_batch_tokens=8192"]
    said = list(plan.report(settings, 8, "80GB"))
    assert any("a rank needs more than its GPU has" in line for line in said)
    ways = [line.split(":")[0].strip() for line in said[-3:]]
    assert ways == ["trainer.gradient_checkpointing=true", "trainer.offload_optimizer=true", "model.lora={}"]
    settings += ["model.lora={}", "trainer.gradient_checkpointing=true", "server.gpu_memory_utilization=0.7"]
    said = list(plan.report(settings, 2, "24GB"))
    assert "no room for one sequence of 4,096 tokens; choose a shorter model.max_length" in said[-1]


@pytest.mark.parametrize(("room", "fits"), [(1.01, False), (1.12, True)])  # the margin is a tenth of what there is
def test_a_rank_fits_where_a_sequence_does_with_the_margin_that_the_trainer_leaves(
    room: float, fits: bool, models: dict[str, str]
) -> None:
    config = load(None, [f"model.path={models['0.5B']}", *COMMON, *MODES["offload"], "server.kv_cache_mib=64"])
    rank = plan.Needs(config, 2, plan.GPUS["80GB"]).rank  # of 8192 tokens
    needed = rank.total - rank.activations * (1 - (256 + 1024) / 8192)  # of one prompt and completion
    found = plan.Needs(config, 2, plan.Gpu("H100", room * needed / GIB, 3.35e12))
    assert found.fits is (found.largest_micro_batch >= 256 + 1024) is fits
    assert not fits or "offload" in found.seconds


def test_sources_of_a_mixture_are_reckoned_with_their_own_lengths(models: dict[str, str]) -> None:
    sources = "data.sources=[{name: a, weight: 3, max_tokens: 100}, {name: b, max_tokens: 500}]"
    settings = (["rollout.max_tokens=4000", sources], ["rollout.max_tokens=200"], ["rollout.max_tokens=4000"])
    two, short, long = (needs(models["0.5B"], *each, card="24GB").seconds for each in settings)
    assert two["rank 0"] == pytest.approx(short["rank 0"])  # (3 x 100 + 1 x 500) / 4
    assert two["generate"] < long["generate"] / 4


def test_an_unknown_card_is_refused_with_those_that_are_known(models: dict[str, str]) -> None:
    settings = [f"model.path={models['0.5B']}"]
    assert "8 x 80GB (H100)" in next(plan.report(settings, 8, "h100"))
    with pytest.raises(ConfigError, match=r"--gpu 90GB is not known: choose 24GB \(4090\), 48GB"):
        list(plan.report(settings, 8, "90GB"))


def test_a_plan_is_of_the_gpus_that_are_here_and_of_the_cpu_without_one(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"model.path={models['0.5B']}", "model.max_length=32768"]
    monkeypatch.setattr(plan, "visible_gpus", list)
    monkeypatch.setattr("hocket.common.machine.free_memory", lambda: 40 * GIB)
    first, server, trainer, whole, versions = plan.report(settings, None, None)
    assert "494,032,768 parameters; this machine's CPU, 40.0 GiB of memory are free" in first
    # 24 layers, 2 heads of keys and values of 64 numbers, in float32; 16 prompts of 16 blocks of 32
    # tokens, and behind each 8 completions of 256 tokens, which touch 9 blocks
    kv_cache = 2 * 24 * 2 * 64 * 4 * 32 * 16 * (16 + 8 * 9)
    weights = 4 * (494_032_768 + 151_936 * 896)  # the head is packed beside the embedding
    assert f"libraries 0.62, weights {weights / GIB:.2f}, KV cache {kv_cache / GIB:.2f}, work" in server
    assert server.startswith("server   1 of ")
    assert trainer.startswith("trainer  1 of ")
    assert "libraries 0.37, weights 1.84, gradients 1.84, optimizer 3.68, activations" in trainer
    assert whole.startswith("in all ")
    assert versions.startswith("weights  2 versions of 1.84 GiB besides, in shared memory")
    assert not any("versions" in line for line in plan.report([*settings, "model.lora={}"], None, None))
    monkeypatch.setattr("hocket.common.machine.free_memory", lambda: 4 * GIB)
    assert "does not fit: this run needs " in [*plan.report(settings, 0, None)][-1]
    assert "8 x 24GB (4090)" in next(plan.report(settings, None, "24GB"))
    monkeypatch.setattr(plan, "visible_gpus", lambda: ["0", "1", "2"])
    monkeypatch.setattr("hocket.common.environment.nvidia_smi", lambda column: ["46068", "MiB"] * 3)
    assert "3 x 48GB (L40S)" in next(plan.report(settings, None, None))


@pytest.mark.parametrize(("size", "what"), [(3, "4 ranks"), (4, "14 attention heads of .*")])
def test_ranks_that_can_not_divide_rows_are_refused_before_they_are_rented(
    size: int, what: str, models: dict[str, str]
) -> None:
    settings = [f"model.path={models['0.5B']}", *COMMON, "launch.servers=4", f"trainer.sequence_parallel={size}"]
    with pytest.raises(ConfigError, match=f"sequence_parallel={size} does not divide the {what}: set a divisor"):
        list(plan.report(settings, 8, "80GB"))


def test_every_card_has_a_peak() -> None:
    assert {gpu.name for gpu in plan.GPUS.values()} <= plan.flops.PEAKS.keys()


def test_a_stage_has_all_gpus_for_its_ranks_and_what_it_needs_beside_the_model(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.data.tokenizer.load", lambda *_: SimpleNamespace(pad_token_id=0, get_vocab=dict))
    path = models["7B"]

    def needs(*settings: str) -> plan.Needs:
        config = load(None, [f"model.path={path}", *COMMON, *settings])
        return plan.Needs(config, 4, plan.GPUS["80GB"], staged(config))

    of_sft, of_dpo, of_rm = needs("sft.epochs=1"), needs(f"dpo.reference={path}"), needs("rm.epochs=1")
    assert of_sft.where.num_ranks == 4
    assert of_dpo.rank.weights == 2 * of_sft.rank.weights
    assert of_rm.rank.logits < of_sft.rank.logits / 1000  # one score in place of a vocabulary
    assert of_rm.trained < of_sft.trained  # no output head
    assert needs("dpo.beta=0.2").rank == of_sft.rank
    settings = [f"model.path={path}", "rm.epochs=1"]
    said = list(plan.report(settings, 4, "80GB", staged(load(None, settings))))
    assert [line.split()[0] for line in said[1:]] == ["ranks", "largest", "host"]
