"""What a run needs of a machine's memory on a CPU, by process, and what is advised where there is less."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from hocket.commands import room
from hocket.commands.parts import Parts
from hocket.commands.servers import Servers
from hocket.common import machine, tasks
from hocket.config import Config, load
from hocket.errors import ConfigError
from hocket.trainer.memory import GIB
from hocket.trainer.objective import configured

MIB = 1 << 20
WEIGHTS = 134_515_008  # of the model below, as many as SmolLM2-135M has
HEAD = 49_152 * 576
BATCH = ["rollout.prompts_per_step=8", "rollout.group_size=8", "rollout.max_tokens=24", "model.max_length=1024"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the config.json of a model of the size of SmolLM2-135M."""
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)


def config_of(model: str, *settings: str) -> Config:
    return load(None, [f"model.path={model}", *BATCH, *settings]).chosen(on_gpu=False)


def needs(model: str, *settings: str) -> room.MachineNeeds:
    config = config_of(model, *settings)
    return room.needs(config, configured(config), num_servers=1)


def test_each_process_needs_what_is_worked_out_by_hand(model: str) -> None:
    needed = needs(model)
    assert needed.parameters == WEIGHTS
    assert needed.server.weights == 4 * (WEIGHTS + HEAD)  # the head is packed beside the embedding
    # 8 prompts of 16 blocks, and behind each 8 completions of 2, with 32 tokens of 2 x 30 layers x 3 heads x 64 numbers
    assert needed.server.kv_cache == 8 * (16 + 8 * 2) * 32 * (2 * 30 * 3 * 64 * 4)
    # 64 prompts of 256 tokens are more than the 8192 that are computed at once; 64 sequences are sampled at once.
    assert needed.server.work == 4 * 8192 * (3 * 1536 + 4 * 576) + 8 * 4 * 64 * 49_152
    assert needed.server.loading == 4 * WEIGHTS / 2 + 2 * 4 * HEAD
    assert needed.of_servers == 630 * MIB + sum(needed.server[1:])
    assert needed.rank.optimizer == 8 * WEIGHTS
    assert needed.of_trainer == 380 * MIB + needed.rank.total
    assert needed.total == needed.of_servers + needed.of_trainer + 55 * MIB


def test_an_adapter_takes_less_on_both_sides(model: str) -> None:
    full, adapted = needs(model), needs(model, "model.lora={rank: 16}")
    adapter = adapted.parameters - WEIGHTS
    # 16 x (inputs + outputs): q and o of 576 x 576, k and v of 576 x 192, gate, up and down of 576 x 1536
    assert adapter == 30 * 16 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert adapted.server.loading == 4 * (WEIGHTS + adapter) / 2
    assert adapted.rank.optimizer == 8 * adapter
    assert adapted.total < full.total - 1.5 * GIB


def test_two_servers_and_two_workers_of_each_count_each(model: str) -> None:
    config = config_of(model, "server.tensor_parallel_size=2")
    needed = room.needs(config, configured(config), num_servers=2, num_ranks=2)
    assert needed.server.libraries == (630 + 400) * MIB
    assert needed.of_servers == 2 * needed.server.total
    assert needed.of_trainer == 2 * (380 * MIB + needed.rank.total)


@pytest.mark.parametrize(
    ("gib", "settings"),
    [
        (5.5, "trainer.gradient_checkpointing=true"),
        (3.6, "trainer.micro_batch_tokens=512 trainer.gradient_checkpointing=true model.lora={}"),
    ],
)
def test_a_run_without_room_is_refused_with_the_first_settings_that_fit(model: str, gib: float, settings: str) -> None:
    with pytest.raises(ConfigError) as refused:
        room.refuse(config_of(model), num_servers=1, free=gib * GIB)
    message = str(refused.value)
    assert f"this run needs 7.0 GiB of this machine's memory (server 2.3, trainer 4.6), and {gib} GiB" in message
    assert f"are free: set {settings}, which needs " in message
    assert needs(model, *settings.split()).total <= gib * GIB


def test_a_trainer_alone_counts_no_server_and_may_take_smaller_micro_batches(model: str) -> None:
    room.refuse(config_of(model, "server.kv_cache_mib=16"), num_servers=0, free=4.5 * GIB)  # no server would start so
    with pytest.raises(ConfigError, match=r"\(trainer 4.6\).*set trainer.micro_batch_tokens=512, which needs 3.4 GiB"):
        room.refuse(config_of(model), num_servers=0, free=3.5 * GIB)


def test_a_run_that_no_setting_saves_is_refused_with_what_comes_nearest(model: str) -> None:
    with pytest.raises(ConfigError, match=r"no setting makes it fit \(.*model.dtype=bfloat16 needs 2.6\); free some"):
        room.refuse(config_of(model), num_servers=1, free=GIB)


def test_settings_that_are_chosen_already_are_not_advised(model: str) -> None:
    chosen = ("trainer.gradient_checkpointing=true", "model.lora={}", "model.dtype=bfloat16")
    keys = {key for way in room.ways(config_of(model, *chosen)) for key in way}
    assert keys == {"trainer.micro_batch_tokens", "model.max_length"}
    assert {"server.kv_cache_mib": None} in room.ways(config_of(model, "server.kv_cache_mib=4096"))


def test_a_trainer_is_refused_before_anything_is_loaded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 2 * GIB)
    monkeypatch.setattr("hocket.trainer.trainer.Trainer", lambda config: pytest.fail("loaded"))
    parts: Any = type("WithConfig", (), {"config": config_of(model)})()
    with pytest.raises(ConfigError, match=r"this run needs 7.0 GiB"):
        Parts.trainer(parts, needed=0, num_servers=1)
    monkeypatch.setenv(machine.FREE_VARIABLE, str(GIB))  # a launch has measured it before its server took any
    with pytest.raises(ConfigError, match=r"1.0 GiB are free"):
        Parts.trainer(parts, needed=0, num_servers=1)


def test_servers_count_where_a_launch_has_just_started_them_or_none_answers_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_come(*settings: str) -> int:
        return tasks.run(Servers(load(None, [f"run.dir={tmp_path}", "server.port=1", *settings])).num_to_come())

    assert to_come() == 1
    assert to_come("server.urls=['http://127.0.0.1:1']") == 0  # it is somewhere else, or has its memory
    assert to_come("pipeline.replay=runs/other") == 0
    monkeypatch.setenv(machine.FREE_VARIABLE, str(GIB))
    assert to_come("server.urls=['http://127.0.0.1:1']", "launch.servers=2") == 2
