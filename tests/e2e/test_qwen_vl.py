"""Runs of Qwen2.5-VL and Qwen3-VL with 0 to 4 pictures a prompt. They need torchvision, which comes with CUDA."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from support.eyes import TEMPLATE, picture, write
from support.processes import START_S, Process, free_port
from support.tokenizers import shipped

pytest.importorskip("torchvision")
pytestmark = [pytest.mark.e2e, pytest.mark.long]

WORDS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
EYES = {"hidden_size": 64, "intermediate_size": 128, "depth": 3, "num_heads": 4, "out_hidden_size": 128}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2_5_VL": ({"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [2]}, {}),
    "Qwen3VL": (
        {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        {"mrope_interleaved": True},
    ),
}
REWARD = """from hocket.rewards import reward
@reward("digits")
def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / 4
"""


def make(family: str, folder: Path) -> None:
    """Writes a random model of three layers with the family's processor."""
    tokenizer = shipped()
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokenizer.extra_special_tokens, *WORDS]})
    (start, end, image, video) = tokenizer.convert_tokens_to_ids(WORDS)
    eyes, rope = FAMILIES[family]
    rope |= {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    config = getattr(transformers, f"{family}Config")(
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        vision_config=EYES | eyes,
        text_config=TEXT
        | {
            "vocab_size": len(tokenizer),
            "rope_parameters": rope,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
        },
    )
    write(config, folder, initializer_range=0.08)
    side = 2 * eyes["patch_size"]
    pictures = transformers.Qwen2VLImageProcessor(
        patch_size=eyes["patch_size"], size={"shortest_edge": side**2, "longest_edge": (4 * side) ** 2}
    )
    processor = getattr(transformers, f"{family}Processor")(
        image_processor=pictures,
        tokenizer=tokenizer,
        video_processor=getattr(transformers, "Qwen2VLVideoProcessor" if "2" in family else "Qwen3VLVideoProcessor")(),
        chat_template=TEMPLATE.replace("'<image>'", "'<|vision_start|><|image_pad|><|vision_end|>'"),
    )
    processor.save_pretrained(folder)


def rows() -> list[dict[str, Any]]:
    """Returns prompts with 0 to 4 pictures of any shape among their words."""
    draw = random.Random(5)
    made = []
    for number in range(40):
        parts: list[dict[str, Any]] = []
        for place in range(number % 5):
            data = picture(10 * number + place, draw.randint(28, 200), draw.randint(28, 200))
            url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
            parts += [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": draw.choice(["and", ""])},
            ]
        parts.append({"type": "text", "text": f"row {number}"})
        made.append({"prompt": [{"role": "user", "content": parts}], "answer": "4"})
    return made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "trained", [(), ("model.freeze=[vision]",), ("model.lora.rank=4",)], ids=["all", "frozen", "lora"]
)
def test_the_engine_computes_with_the_trained_weights_of_a_qwen_that_sees(
    family: str, trained: tuple[str, ...], tmp_path: Path
) -> None:
    make(family, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (tmp_path / "reward.py").write_text(REWARD)
    settings = (
        f"run.dir={tmp_path / 'run'}",
        f"server.port={free_port()}",
        f"model.path={tmp_path / 'model'}",
        f"data.source={tmp_path / 'rows.jsonl'}",
        f"plugins=[{tmp_path / 'reward.py'}]",
        "rewards.functions={digits: 1}",
        "server.engine={limit_mm_per_prompt: {image: 4}}",
        "rollout.prompts_per_step=10",
        "trainer.learning_rate=1e-3",
        "trainer.steps=3",
        "sync.check_every=1",
        "observe.page=false",
    )
    with Process(["quickstart", "config/shapes.yaml", *settings, *trained], tmp_path / "log") as process:
        assert process.wait_end(START_S + 300) == 0, process.output()
        process.assert_gone()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "train/logprob_gap" in record]
    assert len(steps) == 3
    for step in steps:
        assert step["train/logprob_gap"] < 1e-5
        assert step["sync/mismatches"] == 0
    assert steps[-1]["sync/logprob_gap"] < 1e-5
