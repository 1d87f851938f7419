"""The model as the trainer sees it: token ids in, log-probabilities and entropies of given tokens out."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import is_flash_attn_2_available

from hocket.config import ModelConfig
from hocket.errors import ConfigError, TrainerError
from hocket.trainer import lora
from hocket.trainer.batching import TrainBatch
from hocket.trainer.logprobs import token_logprobs

PREFIX = "model."
"""What the name of a parameter of Policy.model begins with."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Returns the precision of forward and backward passes; master weights are float32 in any case."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[config.dtype]


class Policy(nn.Module):
    """A Hugging Face causal language model whose forward never holds all logits.

    Dropout is off: the engine that samples has none, so log-probs could not agree with it.

    Args:
        config: which model; with random_init only its architecture is read.
        dtype: of the parameters.
        device: where it will run, which decides the attention kernel.
        temperature: logits are divided by it.
        chunk_tokens: positions whose logits exist at the same time.
        seed: of random weights, and of a new adapter.

    Attributes:
        adapter: what is trained, alone, where it is not None.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        temperature: float,
        chunk_tokens: int,
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        # Sequences share rows. flash_attention_2 keeps them apart only where the whole batch is a single row.
        self.single_row = device.type == "cuda" and dtype != torch.float32 and is_flash_attn_2_available()
        transformers.utils.logging.disable_progress_bar()
        options = {"dtype": dtype, "attn_implementation": "flash_attention_2" if self.single_row else "sdpa"}
        if config.random_init:
            architecture = _load(transformers.AutoConfig.from_pretrained, config.path)
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(architecture, **options)
        else:
            model = _load(transformers.AutoModelForCausalLM.from_pretrained, config.path, **options)
        self.adapter = None if config.lora is None else lora.inject(model, config.lora, base=config.path, seed=seed)
        self.model = model
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.train()  # transformers recomputes activations in training mode only
        _switch_dropout_off(model)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: ids below it are valid."""
        return int(self.model.config.get_text_config().vocab_size)

    def as_published(self, bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Returns trained parameters under the names, and in the shapes, that checkpoints of this architecture have.

        Those of an adapter have PEFT's names.
        """
        named = {name.removeprefix(PREFIX): tensor for name, tensor in bucket}
        if self.adapter is not None:
            return [(lora.published_name(name), tensor) for name, tensor in named.items()]
        return list(revert_weight_conversion(self.model, named).items())

    def forward(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Returns (logprobs_bt, entropy_bt) of the batch's targets, 0 where its mask is false."""
        hidden_bth = self._hidden(batch.input_ids_bt, batch.position_ids_bt)
        return token_logprobs(
            hidden_bth,
            self.model.get_output_embeddings(),
            batch.target_ids_bt,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            mask_bt=batch.mask_bt,
            max_tokens=batch.max_tokens,
        )

    def _hidden(self, input_ids_bt: Tensor, position_ids_bt: Tensor) -> Tensor:
        shape = (1, -1) if self.single_row else input_ids_bt.shape
        # Without mask and cache, transformers reads segments off the positions: each restart begins a new one.
        output = self.model.base_model(
            input_ids=input_ids_bt.reshape(shape),
            position_ids=position_ids_bt.reshape(shape),
            attention_mask=None,
            use_cache=False,
        )
        hidden_bth: Tensor = output.last_hidden_state
        return hidden_bth.view(*input_ids_bt.shape, -1)

    @torch.no_grad()
    def check_architecture(self, device: torch.device) -> None:
        """Raises TrainerError where this class's shortcuts don't hold for the architecture.

        The shortcuts are: logits are the output head of the last hidden state, and segments of a row don't see each
        other. Some architectures scale or cap logits, or carry a state along the row; they would train silently wrong.
        """
        ids_bt = (torch.arange(16, device=device)[None] * 7919 + 1) % self.vocab_size
        positions_bt = torch.arange(8, device=device).repeat(2)[None]
        head = self.model.get_output_embeddings()
        alone = [head(self._hidden(ids_bt[:, part], positions_bt[:, part])) for part in (slice(0, 8), slice(8, 16))]
        expected = self.model(input_ids=ids_bt[:, 8:], position_ids=positions_bt[:, 8:], use_cache=False).logits
        packed = head(self._hidden(ids_bt, positions_bt))
        name = type(self.model).__name__
        if not _close(alone[1], expected):
            raise TrainerError(f"{name} changes its logits after the output head; it can't be trained here")
        if not _close(packed, torch.cat(alone, dim=1)):
            raise TrainerError(f"{name} lets sequences that share a row see each other; it can't be trained here")


def write_model(folder: Path, model: Any, tokenizer: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Writes a model in Hugging Face format: safetensors, config.json, tokenizer.

    Args:
        model: only its architecture is used.
        tensors: its parameters in `dtype`, each tied one once.
    """
    model.save_pretrained(folder, state_dict=dict(tensors))
    model.config.dtype = dtype  # of the tensors; the live parameters of ZeRO-0 are float32
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):  # written for the owner only; the server may be another user
        shutil.copymode(folder / "config.json", file)


def _close(actual: Tensor, expected: Tensor) -> bool:
    # Relative to the spread of the logits: rounding in 16 bits stays far below this, a real difference does not.
    return bool((actual - expected).float().abs().mean() <= 0.05 * expected.float().std())


def _switch_dropout_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - a number, which nn.Module is not typed to hold


def _load(loader: Any, path: str, **options: Any) -> Any:
    try:
        return loader(path, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't load the model at model.path={path}: {error}") from error
