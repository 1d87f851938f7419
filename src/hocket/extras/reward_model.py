"""Score completions with a reward model: a sequence classifier of transformers
(docs/how-to/judge.md)."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from transformers import AutoConfig
from transformers import AutoModelForSequenceClassification as Classifier

from hocket.common.tasks import run_in_thread
from hocket.config import ModelConfig
from hocket.config.sections import ChosenDtype
from hocket.data import model_folder
from hocket.data import tokenizer as tokenizers
from hocket.rewards.base import reward
from hocket.rewards.runners import clock, clocked
from hocket.rewards.scores import NoScoreError, failure
from hocket.types import Rollout, Score

Size = Annotated[int, Field(ge=1)]
SECTION = "rewards.functions.reward_model"


@reward("reward_model", own_deadline=True)
@dataclasses.dataclass(eq=False)
class ModelReward:
    """Scores a prompt with a completion by the logit of a reward model."""

    path: str
    device: str = "cpu"
    dtype: ChosenDtype = "auto"
    batch_size: Size = 8
    max_length: Size | None = None
    label: int | None = None
    probability: bool = False

    def __post_init__(self) -> None:
        self._tokenizer = tokenizers.load(self.path, f"{SECTION}.path")
        config = AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        labels = config.num_labels
        kinds = str(config.architectures)
        # To another model transformers would add a head of random weights.
        if "ForSequenceClassification" not in kinds:
            raise ValueError(
                f"{self.path} is no sequence classifier: config.json names the architectures "
                f"{kinds}"
            )
        model_folder.examine(
            ModelConfig(path=self.path), f"{SECTION}.path", trains=False, head="score"
        )
        if self.label not in range(labels) and (labels, self.label) != (1, None):
            raise ValueError(
                f"{self.path} has {labels} labels: set label to the index of one, {config.id2label}"
            )
        text = config.get_text_config()
        readable = self._tokenizer.model_max_length, getattr(text, "max_position_embeddings", None)
        self._longest = min(filter(None, (self.max_length, *readable)))
        pad = getattr(text, "pad_token_id", None)
        self._tokenizer.pad_token = (
            None if pad is None or pad < 0 else self._tokenizer.convert_ids_to_tokens(pad)
        )
        if self._tokenizer.pad_token is None:
            # transformers takes the logit of the last token, which in a batch may be padding.
            self.batch_size = 1
        self._one_at_a_time = asyncio.Lock()
        self.call_seconds = clock()

    async def __aenter__(self) -> "ModelReward":
        self._model = await run_in_thread(self._load)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        del self._model

    def _load(self) -> Any:
        loaded = Classifier.from_pretrained(self.path, trust_remote_code=False, dtype=self.dtype)
        positions = [
            part for name, part in loaded.named_modules() if name.endswith("position_embeddings")
        ]
        for part in positions:
            if getattr(part, "padding_idx", None) is not None:  # RoBERTa's positions begin behind
                self._longest = min(self._longest, part.num_embeddings - part.padding_idx - 1)
        return loaded.to(self.device).eval().requires_grad_(False)

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[float | Score]:
        async with self._one_at_a_time:
            with clocked(self.call_seconds):
                return await run_in_thread(self._scores, rollouts)

    def _scores(self, rollouts: Sequence[Rollout]) -> list[float | Score]:
        scores = list[Any](rollouts)
        encoded = dict[int, Any]()
        for i, rollout in enumerate(rollouts):
            try:
                encoded[i] = self._encoded(rollout)
            except Exception as error:  # noqa: BLE001 - this text's, such as half a surrogate pair
                scores[i] = failure(error)
        by_length = sorted(encoded, key=lambda i: len(encoded[i]["input_ids"]))
        for start in range(0, len(by_length), self.batch_size):
            batch = by_length[start : start + self.batch_size]
            inputs = [encoded[i] for i in batch]
            several = len(batch) > 1
            padded = self._tokenizer.pad(
                inputs, several, padding_side="right", return_tensors="pt", verbose=False
            )
            logits = self._model(**padded.to(self.device)).logits.float()
            if self.probability:
                logits = logits.softmax(-1) if logits.shape[-1] > 1 else logits.sigmoid()
            for i, value in zip(batch, logits[:, self.label or 0].tolist(), strict=True):
                scores[i] = value
        return scores

    def _encoded(self, rollout: Rollout) -> Any:
        """Tokenize prompt and completion. Raise NoScoreError if they are too long, or the prompt
        has images."""
        prompt = rollout.prompt
        if prompt.images:
            raise NoScoreError(
                f"{self.path} reads text alone, and the prompt has images: leave out {SECTION}"
            )
        template = self._tokenizer.chat_template
        text: Any = prompt.text + rollout.text
        if template:
            chat = list(prompt.messages or [{"role": "user", "content": prompt.text}])
            chat.append({"role": "assistant", "content": rollout.text})
            text = self._tokenizer.apply_chat_template(chat, tokenize=False)
        elif self._tokenizer.sep_token:
            text = prompt.text, rollout.text
        encoded = self._tokenizer([text], add_special_tokens=not template, verbose=False)
        length = len(encoded["input_ids"][0])
        if length > self._longest:
            more = f"more than the {self._longest} that {self.path} may read ({SECTION}.max_length)"
            raise NoScoreError(f"prompt and completion have {length} tokens, {more}")
        return {name: values[0] for name, values in encoded.items()}
