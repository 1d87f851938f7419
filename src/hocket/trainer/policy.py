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
    Logits,
    TokenStatistics,
    kept_bytes,
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

PREFIX = "model."  # with which the names of a Policy's parameters begin


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Choose the precision of the forward pass: model.dtype, or what `auto` means on a device."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return cast(torch.dtype, getattr(torch, config.dtype))


class Policy(nn.Module):
    """A Hugging Face causal language model whose forward pass never holds all logits.

    Args:
        config: the model, its weights and what is trained of them.
        dtype: precision of the parameters.
        temperature: the sampling temperature; logits are divided by it.
        gradient_checkpointing: whether, or how, the backward pass computes activations again.
        kernels: the kernels that replace PyTorch's.
        entropy_gradient: whether the entropy has a gradient.
        seed: seed of random weights, and of a new adapter.
        loads: whether this rank loads the weights; if not, they are meta tensors until
            engine.spread brings those of rank 0.
    """

    scores = False  # whether transformers loads the model as a classifier of sequences
    uses_logits = True  # whether it computes logits of tokens; if not, files may lack their head

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

        # Load the model, and freeze or add weights as the config says.
        torch.manual_seed(seed)
        model = self._transformers_model(config, dtype, loads)
        _bound_longrope(model, config, loads)
        self.weights.prepare(model, seed)
        self.model = model
        self._num_weights = sum(parameter.numel() for parameter in model.parameters())

        self.vision: Any = None  # the images' part; None for a text model
        if is_multimodal(model.config):
            from hocket.trainer.vision import Vision

            self.vision = Vision(config.path, model)
        self.temperature = temperature
        # Further numbers of each token, beside log-prob and entropy. The trainer sets them.
        self.statistics: TokenStatistics | None = None
        self.entropy_gradient = entropy_gradient
        self._forward_pass: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )
        self._apply_choices(kernels, gradient_checkpointing)
        architecture.set_evaluation_mode(model)
        if config.float32_head:
            compute_in_float32(head_of(model))

    def _transformers_model(self, config: ModelConfig, dtype: torch.dtype, loads: bool) -> Any:
        """Load the model, or make it of meta tensors where this rank loads no weights."""
        options: dict[str, Any] = {
            "dtype": dtype,
            "attn_implementation": attention.NAME,
            "scores": self.scores,
        }
        options |= self.weights.options(dtype)
        if loads:
            return load_model(
                config.path, random_init=config.random_init, head=self.uses_logits, **options
            )
        return empty_model(config.path, **options)

    def _apply_choices(self, kernels: Chosen, gradient_checkpointing: bool | Chosen) -> None:
        """Change the model for the chosen kernels and the chosen recomputation of activations."""
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        if kernels != choices.EAGER:
            choices.chosen_kernels(kernels).apply(self.model)
        if gradient_checkpointing:  # after the kernels: it may wrap a layer that they replace
            recomputation = choices.chosen_recomputation(gradient_checkpointing)
            recomputation.prepare(self.model)
            self._forward_pass = recomputation.forward_pass

    @functools.cached_property
    def logits(self) -> Logits:
        """How logits follow from the output of the head; computed with a small model."""
        return architecture.try_small(self.model.config)

    @property
    def vocab_size(self) -> int:
        """The number of logits, which may be more than the tokenizer's tokens."""
        return int(self.model.config.get_text_config().vocab_size)

    def as_published(self, bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Convert parameters of this module to the names and shapes that servers know."""
        named = {name.removeprefix(PREFIX): tensor for name, tensor in bucket}
        return list(self.weights.published(self.model, named).items())

    def write(
        self, folder: Path, named: Sequence[tuple[str, Tensor]], tokenizer: Any, dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """Write parameters as published; return the specs of the tensors in memory."""
        # DeepSpeed's parameters are parts of a larger tensor.
        published = unshared(dict(self.as_published(named)))
        with concurrent.futures.ThreadPoolExecutor(1) as checksums:  # while the tensors are written
            specs = checksums.submit(manifest.specs, published.items())
            self.weights.write(folder, self.model, tokenizer, published, dtype)
        return specs.result()

    def forward(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        """Compute the log-prob and entropy of each target of the batch, [1, t] each.

        They are 0 where the batch's mask is False. The columns of `statistics` follow, if the
        policy has any.
        """
        hidden_brh = self._hidden(batch.input_ids_br, batch.segments, batch.images)
        row_bytes = 4 * batch.max_tokens * self.vocab_size
        kept = kept_bytes(self._num_weights, on_gpu=hidden_brh.device.type != "cpu")
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
            recomputes=row_bytes > kept,
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
        # A row without an image has got a blank image at its end, which is cut off.
        return hidden_brh[:, : input_ids_br.shape[1]]

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]
    def check_architecture(self, device: torch.device) -> None:
        """Raise TrainerError for an architecture, or weights, that would be trained wrong here.

        Three sequences are computed in one row, as in training, and each alone with the model's
        own attention. Both ways must give the same hidden states and logits, but for rounding.
        """
        logits_kind = self.logits  # raises TrainerError, too
        sequences, prefix_length, images = self._sequences_to_check(device)
        row_br, segments = architecture.row_of_three(sequences, prefix_length)
        packed_brh = self._hidden(row_br, segments, images)

        # Compute each sequence alone, as transformers does.
        self.model.set_attn_implementation(attention_setting(self.model.config, "eager"))
        all_inputs = []
        alone = []
        for index, sequence_bt in enumerate(sequences):
            inputs: dict[str, Tensor] = {"input_ids": sequence_bt}
            if images and index != 1:  # the second sequence has no image
                inputs |= self.vision.alone(self.model, sequence_bt, images)
            all_inputs.append(inputs)
            alone.append(self.model.base_model(**inputs, use_cache=False)[0])
        expected_brh = torch.cat([alone[0], alone[1], alone[2][:, prefix_length:]], dim=1)

        # Compare the logits of the third sequence. A classifier has some at one position only.
        if not self.scores:
            expected_logits = self.model(**all_inputs[2], use_cache=False).logits
            logits = logits_kind.of(head_of(self.model)(alone[2]).float())
            if not _are_close(logits, expected_logits):
                self._refuse("changes its logits after the output head")
        self.model.set_attn_implementation(attention_setting(self.model.config, attention.NAME))
        if not _are_close(packed_brh, expected_brh):
            self._refuse(
                "has more in its attention than is computed here, or lets sequences that share a "
                "row see each other"
            )

    def _sequences_to_check(
        self, device: torch.device
    ) -> tuple[Sequence[Tensor], int, Sequence[Image]]:
        """Make three sequences of 8 tokens, [1, t] each; the third begins with a prefix of the first.

        The prefix is four tokens, and an image among them if the model takes images. Returns the
        sequences, the length of the prefix, and its image.
        """
        num_tokens = self.vocab_size
        images: list[Image] = []
        image_length = 0
        if self.vision is not None:
            num_tokens = self.vision.token  # only the image has this token
            blank = self.vision.measure_blank(self.model)
            images = [blank]  # it stands behind two tokens
            image_length = blank.length
        # Any 16 different tokens: 7919 is a prime.
        ids_bt = (torch.arange(16, device=device)[None] * 7919 + 1) % num_tokens
        image_bt = ids_bt.new_full((1, image_length), num_tokens)
        prefix_length = 4 + image_length
        first_bt = torch.cat([ids_bt[:, :2], image_bt, ids_bt[:, 2:8]], dim=1)
        second_bt = ids_bt[:, 8:]
        third_bt = torch.cat([first_bt[:, :prefix_length], ids_bt[:, 8:12]], dim=1)
        return (first_bt, second_bt, third_bt), prefix_length, images

    def _refuse(self, problem: str) -> NoReturn:
        raise TrainerError(f"{type(self.model).__name__} {problem}; it can't be trained here")


def _are_close(actual: Tensor, expected: Tensor) -> Tensor:
    """Check that the mean difference is at most 5 % of the standard deviation.

    Rounding in 16 bits stays far below.
    """
    return (actual - expected).float().abs().mean() <= 0.05 * expected.float().std()


class ScalarModel(Policy):
    """Computes a number for each position with a head of one output: a critic or reward model."""

    uses_logits = False

    # A critic's column is this tensor, where a Policy returns a tuple of columns.
    def forward(self, batch: TrainBatch) -> Any:
        """Compute a number for what is read before each token: float32 [1, t], 0 if not trained."""
        hidden_brh = self._hidden(batch.input_ids_br, batch.segments, batch.images)
        values_n1: Tensor = head_of(self.model)(hidden_brh[0].index_select(0, batch.row_n))
        # Put the n values to their places among the targets.
        zeros_t = torch.zeros(batch.mask_bt.numel(), device=values_n1.device)
        values_bt = zeros_t.index_copy(0, batch.trained_n, values_n1.squeeze(-1).float())[None]
        return batch.segments.part.whole(values_bt)


def _bound_longrope(model: Any, config: ModelConfig, loads: bool) -> None:
    """Choose longrope's factors by the length of the context, as servers do.

    transformers would choose them by the length of the row, which has many sequences.
    """
    for module in model.modules():
        if getattr(module, "rope_type", "") != "longrope":
            continue
        if loads:
            # The module chooses its factors when it is called with the last position.
            last_position = module.inv_freq.new_full((1, 1), context_length(config) - 1)
            module(module.inv_freq, last_position)
        module.rope_type = "default"  # it keeps them from now on


def skeleton(config: ModelConfig, kind: type[Policy] = Policy) -> Any:
    """Make a model as it is trained, on the meta device.

    Raises TrainerError for an architecture that would be trained wrong.
    """
    model = empty_model(config.path, scores=kind.scores)
    architecture.try_small(model.config)  # raises TrainerError
    weights = WEIGHTS.get(config.weights)(config)
    if os.environ.get("RANK", "0") == "0":  # one rank warns for all
        weights.notice(model)
    with torch.device("meta"):
        weights.prepare(model, seed=0)
    return model
