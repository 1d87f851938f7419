"""Reward models: the loss by hand, and scores that are alike wherever the trained model is read."""

import json
import math
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import transformers
from tests.extras.stages.runs import assert_goes_on, make_config, make_pairs, patch_rows, run, weights_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hocket.config import RewardsConfig
from hocket.errors import ConfigError, DataError
from hocket.extras.stages import driver, pairs, rm, stage_of
from hocket.trainer import memory
from hocket.trainer.state import export
from hocket.trainer.trainer import Trainer
from hocket.types import Prompt, Rollout
from support.batches import scorer_of_all
from support.numbers import rounding
from support.parameters import mostly_long
from support.processes import ROOT
from support.training import additions, gradient_additions, pack, sequence

TINY = ROOT / "checkpoints" / "tiny-sort"
WORDS = ("ba", "cab", "dcab", "bedca", "afcbd", "gab")


@pytest.fixture
def model(tied_model: str) -> str:
    return tied_model


def test_the_loss_by_hand() -> None:
    # scores 2 and −1, margin .5; and −1, 1 without one: −log σ(2.5) + .1 · 1, −log σ(−2) + .1 · 0
    both = (sequence((1, 2, 3), 2), sequence((1, 2, 4, 5), 3))
    rows = [pairs.sample(one, margins=margin) for margin in (0.5, 0.0) for one in both]
    [[batch]] = pack(rows, unit=2)
    of_samples = (2.0, -1.0, -1.0, 1.0)
    scores = torch.zeros(batch.mask_bt.shape)
    scores[0, batch.trained_n] = torch.tensor([of_samples[place] for place in batch.places])
    output = rm.comparison_loss(scores, batch, rm.RmOptions(center_coef=0.1))
    expected = (math.log1p(math.exp(-2.5)) + 0.1 + math.log1p(math.exp(2))) / 2
    assert float(output.loss) == pytest.approx(expected, abs=1e-12)  # a dozen operations in float64
    told = {"chosen": 0.5, "rejected": 0.0, "margins": 0.5, "accuracies": 0.5}
    assert {name: float(value) for name, value in output.metrics.items()} == pytest.approx(
        {f"rewards/{name}": value for name, value in told.items()}
    )


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    made = [
        {"prompt": f"Sort: {word}", "chosen": "".join(sorted(word)), "rejected": word, "margin": 0.1} for word in WORDS
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return file


@pytest.mark.parametrize(
    "settings", mostly_long([[], ["model.lora={}", "trainer.zero_stage=3"], ["data.chat_template=false"]], [])
)
async def test_the_trainer_transformers_and_the_reward_give_the_same_scores(
    rows: Path, tmp_path: Path, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    start = Path(shutil.copytree(TINY, tmp_path / "start"))
    common = (f"data.source={rows}", "data.chat_template=true", "rm.center_coef=0.01", "trainer.steps=8")
    held_out = (f"eval.data.source={rows}", "eval.num_prompts=6")
    is_chat = "data.chat_template=false" not in settings
    if not is_chat:
        with pytest.raises(ConfigError, match=r"would read text in .* chat template: set data.chat_template=true"):
            run("rm", str(start), tmp_path, *common, *held_out, *settings)
        (start / "chat_template.jinja").unlink()
    verbosity = transformers.logging.get_verbosity()
    capsys.readouterr()
    records = run("rm", str(start), tmp_path, *common, *held_out, *settings)
    assert "the model has no score.weight: the stage adds this head" in capsys.readouterr().out
    assert transformers.logging.get_verbosity() == verbosity
    folder = tmp_path / "run" / "model"
    assert records[-1]["train/loss"] < records[1]["train/loss"]
    assert records[-1]["eval/rewards/margins"] > records[0]["eval/rewards/margins"]
    config = make_config("rm", str(folder), tmp_path, f"data.source={rows}", "data.chat_template=true", *settings[-1:])
    config = config.model_copy(update={"model": config.model.beside(None)})
    stage = stage_of("rm", config.rm)
    with Trainer(config, objective=stage.objective(config.model)) as trainer:
        samples = driver.flat(stage.load(config.data, trainer.tokenizer, 99))
        own = [sum(scores) for scores in trainer.logprobs(samples)]
    margins = [chosen - rejected for chosen, rejected in zip(own[::2], own[1::2], strict=True)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    # A score is the sum of the head's weights times numbers about 1, a margin is made of two of them.
    away = rounding(additions(str(folder))) * float(classifier.score.weight.detach().abs().sum())
    assert records[-1]["eval/rewards/margins"] == pytest.approx(sum(margins) / 6, abs=2 * away)
    assert (classifier.num_labels, type(classifier).__name__) == (1, "Qwen2ForSequenceClassification")
    rollouts, expected = [], []
    for word in WORDS:
        for said in ("".join(sorted(word)), word):
            asked = f"Sort: {word}"
            chat = ({"role": "user", "content": asked},)
            text = asked + said
            if is_chat:
                text = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": said}], tokenize=False)
            ids = torch.tensor([tokenizer(text, add_special_tokens=not is_chat)["input_ids"]])
            expected.append(float(classifier(ids).logits.detach()))
            prompt = Prompt(id="row", token_ids=(1,), text=asked, messages=chat if is_chat else None)
            rollouts.append(Rollout(id="row", prompt=prompt, sequences=(sequence((1, 2, 3)),)))
            object.__setattr__(rollouts[-1].sequences[0], "text", said)
    assert own == pytest.approx(expected, abs=away)
    assert max(own) - min(own) > 0.1
    functions = {"reward_model": {"path": str(folder), "batch_size": 4}}
    with ExitStack() as stack:
        scorer = stack.enter_context(scorer_of_all(RewardsConfig.model_validate({"functions": functions})))
        scores = await scorer.score_group(rollouts)
    assert [score.total for score in scores] == pytest.approx(own, abs=away)


def test_training_goes_on_from_a_reward_model_and_from_a_checkpoint(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_rows(monkeypatch, make_pairs(12))
    settings = ("trainer.steps=4", "checkpoint.every_steps=2")
    *_, last = assert_goes_on("rm", model, tmp_path, monkeypatch, *settings, at=3)
    export(tmp_path / "run" / "checkpoints" / "step_000004", tmp_path / "run" / "exported" / "model", base=None)
    assert weights_of(tmp_path / "run" / "exported") == weights_of(tmp_path / "run")
    (more,) = run("rm", f"{tmp_path}/run/model", tmp_path, "trainer.steps=1", f"run.dir={tmp_path}/more")
    assert more["train/loss"] < last["train/loss"]
    with pytest.raises(ConfigError, match=r"rm.center_coef: Input should be greater than or equal to 0"):
        run("rm", model, tmp_path, "rm.center_coef=-1")


def test_other_margins_are_other_rows_to_a_resumed_run() -> None:
    one = sequence((1, 2, 3))
    before, now = (driver.Units("comparisons", [pairs.sample(one, margins=margin)]) for margin in (0.1, 0.2))
    now.restore(dict(now.state()))
    with pytest.raises(DataError, match="can't resume: the comparisons were"):
        now.restore(before.state())


@pytest.mark.parametrize("command", ["rm", "dpo"])
def test_a_step_can_be_rehearsed_on_any_number_of_sequences(model: str, tmp_path: Path, command: str) -> None:
    config = make_config(command, model, tmp_path, "trainer.zero_stage=2")
    with Trainer(config, objective=stage_of(command, getattr(config, command)).objective(config.model)) as trainer:
        memory.rehearse(trainer.learners[0], 9, trainer.ranks, longest=4)  # raises where a weight moves


@pytest.mark.parametrize(
    "settings", mostly_long([["model.dtype=bfloat16"], ["trainer.gradient_checkpointing=true"], []], [])
)
def test_what_is_not_read_is_not_computed_behind_the_last_attention_and_changes_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    patch_rows(monkeypatch, make_pairs(12))
    found = []
    for name in ("read", "all"):
        records = run("rm", model, tmp_path, "trainer.steps=3", f"run.dir={tmp_path}/{name}", *settings)
        found.append([record["train/loss"] for record in records])
        monkeypatch.setattr(rm.RewardModel, "_where_read", lambda _, forward, hidden_brh: forward(hidden_brh))
    away = rounding(gradient_additions(model))
    if "model.dtype=bfloat16" in settings:
        away = rounding(20, torch.bfloat16)  # of two layers' results, ten each; sums are in float32
    assert found[0] == pytest.approx(found[1], rel=away)
