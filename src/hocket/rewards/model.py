"""Score completions with a reward model: a sequence classifier of transformers (docs/rewards.md)."""

import asyncio
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from hocket.common.tasks import run_in_thread
from hocket.config.sections import Dtype
from hocket.rewards.base import reward
from hocket.rewards.runners import clock, clocked
from hocket.rewards.scores import failure, no_score
from hocket.types import Rollout, Score

Count = Annotated[int, Field(ge=1)]
SECTION = "rewards.functions.reward_model"


@reward("reward_model", imports=("transformers",), own_deadline=True)
@dataclasses.dataclass(eq=False)
class ModelReward:
    """Return the logit that a reward model gives the prompt's messages with a completion.

    It reads them by its own chat template; without one, prompt and completion: as a pair if its tokenizer has a
    separator, else as one text. The completions of a prompt are scored in batches, those of one prompt at a time. What
    has more than `max_length` tokens is an error.
    """

    path: str  # folder, or name on the hub
    device: str = "cpu"  # of torch: "cuda:1"
    dtype: Dtype = "auto"  # that of its files
    batch_size: Count = 8  # completions in one forward pass; 1 for a model without pad_token_id
    max_length: Count | None = None  # tokens of prompt and completion; None: what the model can read
    label: int | None = None  # index of the logit, for a model that has several
    probability: bool = False  # in its place: the sigmoid; of several labels, the softmax

    def __post_init__(self) -> None:
        from transformers import AutoConfig

        from hocket.data import tokenizer as tokenizers  # with the config's classes: a worker's start would take longer

        self._tokenizer = tokenizers.load(self.path, f"{SECTION}.path")
        config = AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        kind, labels = ", ".join(config.architectures or ["none"]), config.num_labels
        if "ForSequenceClassification" not in kind:  # transformers would give it a head of random weights
            raise ValueError(f"{self.path} is no sequence classifier: config.json names the architecture {kind}")
        if self.label not in range(labels) and (labels, self.label) != (1, None):
            raise ValueError(f"{self.path} has {labels} labels: set label to the index of one, {config.id2label}")
        text = config.get_text_config()
        readable = self._tokenizer.model_max_length, getattr(text, "max_position_embeddings", None)
        self._longest = min(filter(None, (self.max_length, *readable)))
        pad = getattr(text, "pad_token_id", None)
        self._tokenizer.pad_token = None if pad is None or pad < 0 else self._tokenizer.convert_ids_to_tokens(pad)
        if self._tokenizer.pad_token is None:
            self.batch_size = 1  # transformers takes the logit of the last token, a padding one in a batch
        self._one_at_a_time = asyncio.Lock()
        self.seconds = clock()  # of its calls, without what they wait for

    async def __aenter__(self) -> "ModelReward":
        self._model = await run_in_thread(self._load)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        del self._model

    def _load(self) -> Any:
        from transformers import AutoModelForSequenceClassification as Classifier

        loaded = Classifier.from_pretrained(self.path, trust_remote_code=False, dtype=self.dtype)
        for name, part in loaded.named_modules():
            if name.endswith("position_embeddings") and (first := getattr(part, "padding_idx", None)) is not None:
                self._longest = min(self._longest, part.num_embeddings - first - 1)  # RoBERTa's kinds begin behind it
        return loaded.to(self.device).eval().requires_grad_(False)

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[float | Score]:
        async with self._one_at_a_time:
            with clocked(self.seconds):
                return await run_in_thread(self._scores, rollouts)

    def _scores(self, rollouts: Sequence[Rollout]) -> list[float | Score]:
        try:
            return self._in_batches(rollouts)
        except Exception as error:  # noqa: BLE001 - of one text, as a half surrogate pair
            if len(rollouts) == 1:
                return [failure(error)]
            return [score for one in rollouts for score in self._scores([one])]

    def _in_batches(self, rollouts: Sequence[Rollout]) -> list[float | Score]:
        columns = self._columns(rollouts)
        encode = partial(self._tokenizer, add_special_tokens=not self._tokenizer.chat_template, verbose=False)
        lengths = [len(ids) for ids in encode(*columns)["input_ids"]]
        too_long = f"tokens, more than the {self._longest} that {self.path} may read ({SECTION}.max_length)"
        scores: list[float | Score] = [no_score(f"prompt and completion have {n} {too_long}") for n in lengths]
        fit = sorted((i for i, n in enumerate(lengths) if n <= self._longest), key=lengths.__getitem__)
        for start in range(0, len(fit), self.batch_size):
            batch = fit[start : start + self.batch_size]
            texts = [[column[i] for i in batch] for column in columns]
            padded = encode(*texts, padding=len(batch) > 1, padding_side="right", return_tensors="pt")
            logits = self._model(**padded.to(self.device)).logits.float()
            if self.probability:
                logits = logits.softmax(-1) if logits.shape[-1] > 1 else logits.sigmoid()
            for i, score in zip(batch, logits[:, self.label or 0].tolist(), strict=True):
                scores[i] = score
        return scores

    def _columns(self, rollouts: Sequence[Rollout]) -> tuple[list[str], ...]:
        """Return the texts to encode, or their first and second halves."""
        prompt, said = rollouts[0].prompt, [one.text for one in rollouts]
        if self._tokenizer.chat_template:
            asked = prompt.messages or ({"role": "user", "content": prompt.text},)
            chats = [[*asked, {"role": "assistant", "content": text}] for text in said]
            return ([self._tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats],)
        if self._tokenizer.sep_token:
            return [prompt.text] * len(said), said
        return ([prompt.text + text for text in said],)
