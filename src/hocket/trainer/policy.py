"""The model as the trainer sees it: token ids in, log-probabilities and entropies out."""

import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import transformers
from torch import Tensor, nn

from hocket.config import Chosen, ModelConfig
from hocket.data.tokenizer import context_length
from hocket.errors import TrainerError
from hocket.protocol import TensorSpec, manifest
from hocket.trainer import architecture, attention, choices
from hocket.trainer.attention import Segments
from hocket.trainer.batching import TrainBatch
from hocket.trainer.float32_head import compute_in_float32
from hocket.trainer.logprobs import (
    CHUNK_TOKENS,
    KEPT_BYTES,
    Logits,
    TokenStatistics,
    token_logprobs,
)
from hocket.trainer.weights import (
    WEIGHTS,
    attention_setting,
    empty_model,
    head_of,
    is_multimodal,
    load_model,
    unshared,
)
from hocket.types import Image

PREFIX = "model."  # of names of Policy.model's parameters


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return cast(torch.dtype, getattr(torch, config.dtype))


class Policy(nn.Module):
    """A Hugging Face causal language model whose forward pass never holds all logits.

    Args:
        dtype: of the parameters.
        seed: of random weights, and of a new adapter.
        loads: False: the weights are meta tensors until engine.spread brings rank 0's.
    """

    scores = False  # whether the model is a classifier of sequences
    uses_logits = True  # whether it has the head of a language model

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        temperature: float,
        gradient_checkpointing: bool | Chosen = False,
        kernels: Chosen = choices.EAGER,
        entropy_gradient: bool = False,
        seed: int = 0,
        loads: bool = True,
    ) -> None:
        super().__init__()
        transformers.utils.logging.disable_progress_bar()
        self.weights = WEIGHTS.get(config.weights)(config)
        torch.manual_seed(seed)
        model = self._load(config, dtype, loads)
        _bound_longrope(model, config, loads)
        self.weights.prepare(model, seed)
        self.model = model
        self.vision: Any = None
        if is_multimodal(model.config):
            from hocket.trainer.vision import Vision

            self.vision = Vision(config.path, model)
        self.temperature = temperature
        self.statistics: TokenStatistics | None = None  # of each token, beside log-prob and entropy
        self.entropy_gradient = entropy_gradient
        self._forward_pass: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )
        self._choose(kernels, gradient_checkpointing)
        architecture.evaluates(model)
        if config.float32_head:
            compute_in_float32(head_of(model))

    def _load(self, config: ModelConfig, dtype: torch.dtype, loads: bool) -> Any:
        """Load the transformers model, or make it of meta tensors."""
        options = {
            "dtype": dtype,
            "attn_implementation": attention.NAME,
            "scores": self.scores,
            **self.weights.options(dtype),
        }
        if loads:
            return load_model(
                config.path, random_init=config.random_init, head=self.uses_logits, **options
            )
        return empty_model(config.path, **options)

    def _choose(self, kernels: Chosen, gradient_checkpointing: bool | Chosen) -> None:
        """Change the model for the chosen kernels and the chosen recomputation of activations."""
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        if kernels != choices.EAGER:
            choices.chosen_kernels(kernels).apply(self.model)
        if gradient_checkpointing:
            recomputation = choices.chosen_recomputation(gradient_checkpointing)
            recomputation.prepare(self.model)
            self._forward_pass = recomputation.forward_pass

    @functools.cached_property
    def logits(self) -> Logits:
        return architecture.try_small(self.model.config)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def as_published(self, bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        named = {name.removeprefix(PREFIX): tensor for name, tensor in bucket}
        return list(self.weights.published(self.model, named).items())

    def write(
        self, folder: Path, named: Sequence[tuple[str, Tensor]], tokenizer: Any, dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """Write parameters as published; return the specs of the tensors in memory."""
        published = unshared(dict(self.as_published(named)))  # DeepSpeed's are parts of one
        with concurrent.futures.ThreadPoolExecutor(1) as checksums:  # while the tensors are written
            specs = checksums.submit(manifest.specs, published.items())
            self.weights.write(folder, self.model, tokenizer, published, dtype)
        return specs.result()

    def forward(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        """Compute the log-prob and entropy of each target of the batch, [1, t] each.

        0 where its mask is False. Behind these are the columns of `statistics`, if there are any.
        """
        hidden_brh = self._hidden(batch.input_ids_br, batch.segments, batch.images)
        columns = token_logprobs(
            hidden_brh,
            self._logits_of,
            batch.target_ids_bt,
            temperature=self.temperature,
            chunk_tokens=CHUNK_TOKENS,
            trained_n=batch.trained_n,
            row_n=batch.row_n,
            max_tokens=batch.max_tokens,
            entropy_gradient=self.entropy_gradient,
            recomputes=4 * batch.max_tokens * self.vocab_size > KEPT_BYTES,
            statistics=self.statistics,
        )
        return tuple(map(batch.segments.part.whole, columns))

    def _logits_of(self, hidden_nh: Tensor) -> Tensor:
        return self.logits.of(head_of(self.model)(hidden_nh).float())

    def _hidden(
        self, input_ids_br: Tensor, segments: Segments, images: Sequence[Image] = ()
    ) -> Tensor:
        inputs = segments.inputs(input_ids_br)
        if self.vision is not None:
            inputs = self.vision.inputs(self.model, input_ids_br, segments, images)
        with self._forward_pass():
            hidden_brh = cast(
                Tensor, self.model.base_model(**inputs, use_cache=False).last_hidden_state
            )
        return hidden_brh[:, : input_ids_br.shape[1]]  # a blank image may stand behind

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]
    def check_architecture(self, device: torch.device) -> None:
        """Raise TrainerError for an architecture, or weights, that would be trained wrong here.

        Three sequences are computed in one row, as in training, and each alone with the model's
        own attention.
        """
        logits_kind = self.logits

        # The first sequence and the third begin alike: with four tokens, and an image among them if
        # the model takes images.
        num_tokens = self.vocab_size
        images: list[Image] = []
        image_length = 0
        if self.vision is not None:
            num_tokens = self.vision.token
            blank = self.vision.look(self.model)  # behind two tokens
            images = [blank]
            image_length = blank.length
        ids_bt = (torch.arange(16, device=device)[None] * 7919 + 1) % num_tokens
        image_bt = ids_bt.new_full((1, image_length), num_tokens)
        shared = 4 + image_length
        first_bt = torch.cat([ids_bt[:, :2], image_bt, ids_bt[:, 2:8]], dim=1)
        second_bt = ids_bt[:, 8:]
        third_bt = torch.cat([first_bt[:, :shared], ids_bt[:, 8:12]], dim=1)

        # Together: 4 positions behind the shared ones, 8, and 4 that follow on the shared ones.
        row_br = torch.cat([first_bt, second_bt, third_bt[:, shared:]], dim=1)
        places = torch.arange(shared + 16)
        key_places = torch.cat([places[: shared + 12], places[:shared], places[shared + 12 :]])
        segments = Segments((shared + 4, 8, 4), device, (0, 0, shared), key_places)
        packed_brh = self._hidden(row_br, segments, images)

        # Each alone.
        self.model.set_attn_implementation(attention_setting(self.model.config, "eager"))
        alone = []
        for sequence_bt in (first_bt, second_bt, third_bt):
            inputs: dict[str, Tensor] = {"input_ids": sequence_bt}
            if images and sequence_bt is not second_bt:
                inputs |= self.vision.alone(self.model, sequence_bt, images)
            alone.append(self.model.base_model(**inputs, use_cache=False)[0])
        expected_brh = torch.cat([alone[0], alone[1], alone[2][:, shared:]], dim=1)
        logits = expected_logits = alone[2]
        if not self.scores:  # a classifier has logits at the last position only
            expected_logits = self.model(**inputs, use_cache=False).logits  # of the third
            logits = logits_kind.of(head_of(self.model)(alone[2]).float())
        self.model.set_attn_implementation(attention_setting(self.model.config, attention.NAME))

        if not _are_close(logits, expected_logits):
            self._refuse("changes its logits after the output head")
        if not _are_close(packed_brh, expected_brh):
            self._refuse(
                "has more in its attention than is computed here, or lets sequences that share a "
                "row see each other"
            )

    def _refuse(self, problem: str) -> NoReturn:
        raise TrainerError(f"{type(self.model).__name__} {problem}; it can't be trained here")


def _are_close(actual: Tensor, expected: Tensor) -> Tensor:
    """Compare the difference with the numbers' spread: rounding in 16 bits stays far below 5 %."""
    return (actual - expected).float().abs().mean() <= 0.05 * expected.float().std()


class ScalarModel(Policy):
    """A model whose head has one output, a number for each position: a critic or a reward model."""

    uses_logits = False

    def forward(self, batch: TrainBatch) -> Any:  # in place of log-probs and entropies
        """Compute a number for what is read before each token: float32 [1, t], 0 if not trained."""
        hidden_brh = self._hidden(batch.input_ids_br, batch.segments, batch.images)
        values_n1: Tensor = head_of(self.model)(hidden_brh[0].index_select(0, batch.row_n))
        zeros_t = torch.zeros(batch.mask_bt.numel(), device=values_n1.device)
        values_bt = zeros_t.index_copy(0, batch.trained_n, values_n1.squeeze(-1).float())[None]
        return batch.segments.part.whole(values_bt)


def _bound_longrope(model: Any, config: ModelConfig, loads: bool) -> None:
    """Have the length of the context choose longrope's factors, as on servers.

    transformers would choose by the length of the row, in which are many sequences.
    """
    for module in model.modules():
        if getattr(module, "rope_type", "") == "longrope":
            if loads:
                module(
                    module.inv_freq, module.inv_freq.new_full((1, 1), context_length(config) - 1)
                )
            module.rope_type = "default"


def skeleton(config: ModelConfig, kind: type[Policy] = Policy) -> Any:
    """Make a model as it is trained, on the meta device.

    Raises TrainerError for an architecture that would be trained wrong.
    """
    model = empty_model(config.path, scores=kind.scores)
    architecture.try_small(model.config)
    weights = WEIGHTS.get(config.weights)(config)
    if os.environ.get("RANK", "0") == "0":
        weights.notice(model)
    with torch.device("meta"):
        weights.prepare(model, seed=0)
    return model
