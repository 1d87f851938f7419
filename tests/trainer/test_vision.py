"""Models that see: numbers are transformers' own, however sequences with pictures share rows; parts can be frozen."""

import dataclasses
import itertools
import json
import math
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.trainer.test_policy import assert_same_loss_and_gradient, loss_and_gradient
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

from hocket import config as config_module
from hocket.common.vision import Stored, decoded
from hocket.config import ModelConfig
from hocket.errors import ConfigError, TrainerError
from hocket.trainer import batching, flops, memory, packing
from hocket.trainer.critic import ValueModel
from hocket.trainer.policy import Policy, skeleton
from hocket.trainer.prefixes import SharingPacker
from hocket.trainer.ranks import Ranks
from hocket.trainer.state import export
from hocket.trainer.weights import part_of
from hocket.types import Image, TokenSequence, TrainSample
from support import fakes, training
from support.eyes import picture
from support.numbers import rounding
from support.training import additions, assert_near, make_trainer, pack, same, sample_of, save, sequence, weights_of

SIZES = ((40, 64), (64, 64), (24, 20))


@pytest.fixture(params=["tiny_vlm", "tiny_qwen_vl"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def opened(images: tuple[Image, ...]) -> list[list[Any]]:
    return [[decoded(image.data) for image in images]]


def span_of(model: str, data: bytes) -> list[int]:
    """Returns the tokens of a picture, between two others, as the model's processor would write them."""
    config = json.loads(Path(model, "config.json").read_text())
    token, border = config["image_token_id"], config["image_token_id"] + 1
    if config["model_type"] == "idefics3":
        return [border, *[token] * 4, border]
    made = AutoImageProcessor.from_pretrained(model)([[decoded(data)]], return_tensors="pt")
    return [border, *[token] * (int(made["image_grid_thw"].prod()) // 4), border]


def seeing(model: str, pictures: list[bytes], rng: random.Random, *, sampled: int = 4) -> TokenSequence:
    """Returns a sequence of text, pictures with text behind each, and sampled tokens."""
    ids = [rng.randrange(3, 200) for _ in range(6)]
    images = []
    for data in pictures:
        span = span_of(model, data)
        images.append(fakes.image(data, start=len(ids), length=len(span), placeholder=span[1]))
        ids += [*span, rng.randrange(3, 200), rng.randrange(3, 200)]
    answer = [rng.randrange(3, 200) for _ in range(sampled)]
    return dataclasses.replace(sequence([*ids, *answer], len(ids)), images=tuple(images))


def make_seeing(model: str) -> list[TrainSample]:
    """Returns groups of three answers to prompts with 0 to 4 pictures, and one whose second picture is another one."""
    rng = random.Random(5)
    samples = []
    for group in range(5):
        prompt = seeing(model, [picture(10 * group + n, *SIZES[n % 3]) for n in range(group)], rng, sampled=0)
        for _ in range(3):
            ids = (*prompt.token_ids, *(rng.randrange(3, 200) for _ in range(rng.randint(2, 6))))
            rollout = dataclasses.replace(sequence(ids, len(prompt.token_ids)), images=prompt.images)
            samples.append(sample_of(rollout, rng.gauss(0, 1), group=group))
    other = samples[-1].sequence
    images = list(other.images)
    place = {"start": images[1].start, "length": images[1].length, "placeholder": images[1].placeholder}
    images[1] = fakes.image(picture(99, *SIZES[1]), **place)
    return [*samples, sample_of(dataclasses.replace(other, images=tuple(images)), 0.7, group=5)]


@torch.no_grad()
def of_transformers(model: str, samples: list[TrainSample], temperature: float = 1.0) -> list[list[float]]:
    """Returns transformers' own log-probs of sampled tokens, each sequence alone, from its pictures and its ids."""
    loaded = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    process = AutoImageProcessor.from_pretrained(model)
    found = []
    for sample in samples:
        rollout = sample.sequence
        ids = torch.tensor([rollout.token_ids])
        inputs: dict[str, Any] = {"input_ids": ids}
        if rollout.images:
            inputs |= process(opened(rollout.images), return_tensors="pt")
        if rollout.images and loaded.config.model_type != "idefics3":
            inputs["mm_token_type_ids"] = (ids == loaded.config.image_token_id).int()
        logits = loaded(**inputs).logits[0, :-1]
        values = (logits / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
        found.append([value if m else 0.0 for value, m in zip([0.0, *values], rollout.mask, strict=True)])
    return found


def make_policy(model: str, kind: type[Policy] = Policy, **options: Any) -> Any:
    config = ModelConfig(path=model, **options)
    policy = kind(config, dtype=torch.float32, temperature=0.7)
    policy.check_architecture(torch.device("cpu"))
    return policy


def together(policy: Policy, samples: list[TrainSample], **how: Any) -> dict[int, list[float]]:
    """Returns the log-probs of each sample's tokens."""
    found = {}
    for batch in itertools.chain(*pack(samples, **how)):
        parts = policy(batch)[0][0].split(list(batch.lengths))
        found |= {place: [0.0, *part.tolist()] for place, part in zip(batch.places, parts, strict=False)}
    return found


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"micro_batch_tokens": 1}, id="alone", marks=pytest.mark.long),
        pytest.param({}, id="packed", marks=pytest.mark.long),
        pytest.param({"share": math.inf}, id="shared", marks=pytest.mark.long),
        pytest.param({"share": math.inf, "micro_batch_tokens": 90}, id="shared in parts"),
        pytest.param({"micro_batch_tokens": 100, "num_ranks": 4}, id="ranks", marks=pytest.mark.long),
    ],
)
@torch.no_grad()
def test_log_probs_are_those_that_transformers_computes_of_each_sequence_alone(model: str, how: dict[str, Any]) -> None:
    samples = make_seeing(model)
    found = together(make_policy(model), samples, **how)
    for place, expected in enumerate(of_transformers(model, samples, 0.7)):
        assert_near(found[place], expected, additions(model))


def test_loss_and_gradient_do_not_depend_on_how_pictures_share_rows(model: str) -> None:
    policy = make_policy(model)
    samples = make_seeing(model)
    expected_loss, expected = loss_and_gradient(policy, samples, 10_000, 1)
    assert len(expected) == len(list(policy.parameters()))  # the vision tower has gradients, too
    assert abs(expected_loss) > 1e-3
    for order, tokens, ranks in ((samples[::-1], 100, 1), (samples, 100, 3), (samples[4:] + samples[:4], 200, 2)):
        loss, gradients = loss_and_gradient(policy, order, tokens, ranks)
        assert_same_loss_and_gradient(loss, gradients, expected_loss, expected, model)


def test_a_shared_picture_is_computed_once_and_stands_where_its_tokens_do(tiny_vlm: str) -> None:
    samples = make_seeing(tiny_vlm)[9:12]  # three answers to a prompt with three pictures
    [[batch]] = pack(samples, share=math.inf)
    assert [image.start for image in batch.images] == [image.start for image in samples[0].sequence.images]
    [[batch]] = pack(samples)
    assert len(batch.images) == 9
    size = batch.segments.lengths[0]
    assert batch.images[3].start == size + samples[0].sequence.images[0].start
    assert all(batch.input_ids_br[0, image.start + 1] == image.placeholder for image in batch.images)


def test_other_pictures_are_shared_up_to_the_first_that_differs_and_never_to_the_inside_of_one(tiny_vlm: str) -> None:
    *_, one, other = make_seeing(tiny_vlm)
    assert one.sequence.token_ids == other.sequence.token_ids
    second = one.sequence.images[1].start
    assert SharingPacker().starts([one, other]) == [0, second]
    [[batch]] = pack([one, other], share=math.inf)
    assert batch.segments.starts == (0, second)
    assert len(batch.images) == 4 + 3
    # Of a picture all tokens count alike: also one that has other tokens behind its first is another one.
    keys = packing.keys(one.sequence)
    image = one.sequence.images[0]
    assert len(set(keys[image.start : image.start + image.length].tolist())) == 1


def test_a_rank_needs_no_file_of_a_picture(tiny_vlm: str, tmp_path: Path) -> None:
    path = tmp_path / "seen.png"
    path.write_bytes(picture(1))
    sample = seeing(tiny_vlm, [picture(1)], random.Random(0))
    images = (dataclasses.replace(sample.images[0], file=Stored(path.read_bytes)),)
    [[make]] = batching.divide(
        [sample_of(dataclasses.replace(sample, images=images))], micro_batch_tokens=100, num_ranks=1
    )
    sent = pickle.dumps(make)
    path.unlink()
    assert pickle.loads(sent)(torch.device("cpu")).images[0].data == picture(1)


@pytest.mark.parametrize("lie", ["other pixels", "wrong positions"])
def test_a_model_whose_pictures_would_be_seen_wrong_is_refused(
    tiny_qwen_vl: str, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy(tiny_qwen_vl)
    if lie == "wrong positions":
        monkeypatch.setattr("hocket.trainer.vision._has_mrope", lambda model: False)
        policy.vision.alone = lambda *of, alone=policy.vision.alone: (
            alone(*of) | {"mm_token_type_ids": (of[1] == policy.vision.token).int()}
        )
    else:
        whole = policy.vision.inputs
        policy.vision.inputs = lambda *of: {**whole(*of), "pixel_values": torch.zeros(16, 384)}
    with pytest.raises(TrainerError, match="can't be trained here"):
        policy.check_architecture(torch.device("cpu"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("freeze", "moves"),
    [
        ("[vision]", {"projector", "language"}),
        ("[vision,projector]", {"language"}),
        ("[language]", {"vision", "projector"}),
    ],
)
def test_frozen_parts_have_no_state_stay_and_are_in_every_whole_version(
    ranks: Ranks, model: str, freeze: str, moves: set[str], tmp_path: Path
) -> None:
    begin = load_file(Path(model) / "model.safetensors")
    with make_trainer(ranks, model, f"model.freeze={freeze}", "trainer.micro_batch_tokens=200") as trainer:
        trainer.export(tmp_path / "before")
        trainer.step(make_seeing(model))
        trainer.export(tmp_path / "after")
        save(trainer, tmp_path / "state")
        streamed = weights_of(trainer)
        trained = {item.name for bucket in trainer.layout(1 << 30, trained=True) for item in bucket}
        assert {part_of(name) for name in trainer.engine.shapes()} == {part_of(name) for name in trained} == moves
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert same(before, begin)
    assert after.keys() == begin.keys() == streamed.keys() > trained
    assert {part_of(name) for name in begin if not torch.equal(begin[name], after[name])} == moves
    assert same(streamed, after)


def test_parts_that_are_not_there_are_named(ranks: Ranks, tiny_vlm: str, tied_model: str) -> None:
    for path, freeze, known in (
        (tied_model, "[vision]", "has language; name"),
        (tiny_vlm, "[eyes]", "has language, projector, vision; name"),
        (tiny_vlm, "[vision,projector,language]", "but not all"),
    ):
        with pytest.raises(ConfigError, match=known):
            make_trainer(ranks, path, f"model.freeze={freeze}")
    for more, why in (("model.lora={}", "leave out freeze"), ("model.random_init=true", "there are none")):
        with pytest.raises(ConfigError, match=why):
            config_module.load(None, ["model.freeze=[vision]", more])


def test_what_is_written_loads_with_its_processor_and_computes_the_same(
    ranks: Ranks, tiny_vlm: str, tmp_path: Path
) -> None:
    samples = make_seeing(tiny_vlm)
    with make_trainer(ranks, tiny_vlm, "trainer.micro_batch_tokens=200") as trainer:
        trainer.step(samples)
        trainer.export(tmp_path / "model")
        found = trainer.logprobs(samples)
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    [ids] = processor(text=["Look: <image>"], images=[opened(samples[-1].sequence.images[:1])[0]])["input_ids"]
    assert ids.count(samples[-1].sequence.images[0].placeholder) == 4
    for own, expected in zip(found, of_transformers(str(tmp_path / "model"), samples), strict=True):
        assert_near(own, expected, additions(tiny_vlm))


@pytest.mark.long
def test_an_adapter_is_of_the_language_model_alone(ranks: Ranks, model: str, tmp_path: Path) -> None:
    samples = make_seeing(model)
    with make_trainer(ranks, model, "model.lora.targets=[q_proj]", "trainer.micro_batch_tokens=200") as trainer:
        trainer.step(samples)
        trainer.export(tmp_path / "adapter")
        found = trainer.logprobs(samples)
        assert {part_of(name) for name in trainer.engine.shapes()} == {"language"}
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as adapter:
        layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in adapter.keys()}  # noqa: SIM118
    with safe_open(Path(model, "model.safetensors"), "pt") as file:
        assert {f"{layer}.weight" for layer in layers} < set(file.keys())
    export(tmp_path / "adapter", tmp_path / "merged", base=None)
    AutoImageProcessor.from_pretrained(tmp_path / "merged")
    for own, expected in zip(found, of_transformers(str(tmp_path / "merged"), samples), strict=True):
        assert_near(own, expected, additions(model))
    with pytest.raises(ConfigError, match=r"no linear layer 'fc1' besides its output head, only .*q_proj"):
        skeleton(config_module.load(None, [f"model.path={model}", "model.lora.targets=[fc1]"]).model)


@pytest.mark.long
def test_reference_and_critic_see_the_pictures(ranks: Ranks, tiny_vlm: str) -> None:
    preset = "ppo"
    settings = [f"algorithm.preset={preset}", "algorithm.kl=k3", "algorithm.kl_in=loss", "algorithm.kl_coef=0.1"]
    samples = make_seeing(tiny_vlm)
    with make_trainer(ranks, tiny_vlm, *settings, "trainer.micro_batch_tokens=200") as trainer:
        known = training.measured(trainer, samples, returns=1.0)
        own = trainer.logprobs(samples)
        for sample, logprobs in zip(known, own, strict=True):
            assert_near(sample.columns["ref_logprobs"], logprobs, additions(tiny_vlm))
        assert trainer.step(known)["critic/grad_norm"] > 0
    critic = make_policy(tiny_vlm, ValueModel)
    torch.nn.init.normal_(critic.model.lm_head.weight)
    one, other = samples[-2:]  # the same ids, another picture
    [[batch]] = pack([one, other])
    values = critic(batch)[0].split(list(batch.lengths))
    assert (values[0] - values[1])[-2:].abs().min() > 1e-4


def test_pictures_are_refused_where_rows_are_divided(ranks: Ranks, tiny_vlm: str) -> None:
    config = config_module.load(None, [f"model.path={tiny_vlm}", "trainer.sequence_parallel=2"])
    with pytest.raises(ConfigError, match=r"images of .* can't be divided; set 1"):
        memory.needed(
            [(config.model, skeleton(config.model))], config.trainer, torch.float32, num_ranks=2, on_gpu=False
        )


def test_a_resumed_run_goes_on_bit_for_bit_and_its_checkpoint_becomes_a_whole_model(
    ranks: Ranks, tiny_vlm: str, tmp_path: Path
) -> None:
    samples = make_seeing(tiny_vlm)
    settings = ("model.freeze=[vision]", "trainer.micro_batch_tokens=200")
    with make_trainer(ranks, tiny_vlm, *settings) as trainer:
        trainer.step(samples)
        save(trainer, tmp_path / "state")
        expected = trainer.step(samples)
        weights = weights_of(trainer)
    with make_trainer(ranks, tiny_vlm, *settings) as trainer:
        training.load(trainer, tmp_path / "state")
        assert training.untimed(trainer.step(samples)) == training.untimed(expected)
        assert same(weights_of(trainer), weights)


def test_a_lie_about_one_vision_matrix_shows_in_the_gap(ranks: Ranks, tiny_vlm: str, tmp_path: Path) -> None:
    folder = tmp_path / "lying"
    shutil.copytree(tiny_vlm, folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.vision_model.encoder.layers.1.mlp.fc1.weight"
    weights[name] = weights[name].roll(1, dims=0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    samples = make_seeing(tiny_vlm)[3:]
    gaps = {}
    for served in (tiny_vlm, str(folder)):
        scored = [
            sample_of(dataclasses.replace(sample.sequence, logprobs=tuple(logprobs)))
            for sample, logprobs in zip(samples, of_transformers(served, samples), strict=True)
        ]
        with make_trainer(ranks, tiny_vlm, "trainer.micro_batch_tokens=200") as trainer:
            gaps[served] = training.gap_of(trainer, scored)
    apart = rounding(additions(tiny_vlm))  # of a log-prob; what is measured is a mean over many
    assert gaps[tiny_vlm] < apart < gaps[str(folder)]


def test_a_step_is_rehearsed_with_sequences_full_of_pictures(ranks: Ranks, model: str) -> None:
    check_rehearsal(ranks, model, "trainer.gradient_checkpointing=true")


def check_rehearsal(ranks: Ranks, model: str, setting: str) -> None:
    """Checks the pictures of a rehearsed step, and that it leaves no trace."""
    with make_trainer(ranks, model, setting) as trainer:
        before = weights_of(trainer)
        learner = trainer.learners[0]
        rows = list[Any]()
        seeing = dataclasses.replace(learner, loss=lambda batch: rows.append(batch) or learner.loss(batch))
        memory.rehearse(seeing, 60, ranks, 30)
        assert same(weights_of(trainer), before)
        blank = trainer.policy.vision.blank
        assert len(rows[0].images) == 2 * (30 // (blank.length + 1))
        assert int((rows[0].input_ids_br == blank.placeholder).sum()) == len(rows[0].images) * blank.length


def test_operations_are_counted_of_the_language_model(tiny_vlm: str) -> None:
    counted = flops.model_flops(skeleton(ModelConfig(path=tiny_vlm)))
    attention = 128 * (4 + 2 + 2) * 32 + 128 * 128
    assert counted.per_position == 2 * 6 * (attention + 3 * 128 * 256)
    assert counted.windows == (1 << 40,) * 2
