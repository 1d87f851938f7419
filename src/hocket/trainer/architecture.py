"""Whether an architecture is trained as transformers computes it: tried on a small model, before weights are loaded.

The small model has all kinds of layers of the config, but few and narrow ones, random weights and short windows. Its
row is longer than each window: two sequences, and a third that begins like the first. Each should get the numbers that
transformers' own attention ("eager") gives it alone.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from hocket.errors import TrainerError
from hocket.trainer import attention
from hocket.trainer.attention import ADVICE, Segments
from hocket.trainer.logprobs import Logits

WIDTH = 64  # of feed-forward layers, and tokens of the vocabulary
HEADS = 4
LAYERS = 4
WINDOW = 5
# What configs call the width of a feed-forward layer, and what makes it another computation from some length on.
WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "floor_scale")
# The small row, in tokens: what the first sequence and the third begin with, and how each goes on; the second.
SHARED, FIRST, THIRD, SECOND = 8, 11, 9, 13
# Of the numbers' size, in float32: docs/architectures.md has how far rounding goes, and what is wrong is above .01.
TOLERANCE = 1e-3
CAUSAL = 1e-5  # how far later tokens may move a token's numbers: an expert's products round by how many it gets
CAP = "final_logit_softcapping"  # of configs
SEEDS = 3  # rounding may choose another expert: then other weights decide
ITS_OWN = "computes attention with code of its own, not through transformers' AttentionInterface"


_tried: dict[str, Logits] = {}  # by config


def try_small(config: Any) -> Logits:
    """Find how logits follow from the head's output. Raises TrainerError for a model that would train wrong here."""
    text = config.get_text_config()
    key = f"{type(text).__name__} {text.to_json_string(use_diff=False)}"
    if key not in _tried:
        cpu = torch.device("cpu")
        with (
            torch.random.fork_rng(devices=[]),
            cpu,
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            _tried[key] = _try(text)
    return _tried[key]


def evaluates(model: nn.Module) -> None:
    """Have a model compute as in evaluation, without dropout, jitter and dropped layers, but recompute activations."""
    model.eval()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # transformers asks for it
            for name in [name for name in vars(module) if name.endswith("dropout")]:
                setattr(module, name, 0.0)


class Row(NamedTuple):
    """Two sequences, and a third that begins like the first."""

    sequences: tuple[Tensor, Tensor, Tensor]
    segments: Segments
    ids_br: Tensor
    changed_br: Tensor  # other tokens where no other place may notice
    is_changed: Tensor  # [row]

    @classmethod
    def random(cls) -> "Row":
        first, second, third = torch.randint(WIDTH, (3, 1, SHARED + FIRST)).unbind()
        second = second[:, :SECOND]
        third = torch.cat([first[:, :SHARED], third[:, :THIRD]], dim=1)
        rest = SHARED + FIRST + torch.arange(SECOND + THIRD)
        seen = torch.cat(
            [torch.arange(SHARED + FIRST), rest[:SECOND], torch.arange(SHARED), rest[SECOND:]]
        )
        segments = Segments(
            (SHARED + FIRST, SECOND, THIRD), torch.device("cpu"), (0, 0, SHARED), seen
        )
        ids_br = torch.cat([first, second, third[:, SHARED:]], dim=1)
        is_changed = torch.zeros(ids_br.shape[1], dtype=torch.bool)
        is_changed[segments.offsets[1:] - 1] = True  # the last token of each
        is_changed[SHARED + FIRST : -THIRD] = True  # the second sequence
        changed_br = torch.where(is_changed, (ids_br + 1) % WIDTH, ids_br)
        return cls((first, second, third), segments, ids_br, changed_br, is_changed)


def _try(config: Any) -> Logits:
    name = type(config).__name__.removesuffix("Config")
    problem = ""
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        row = Row.random()
        try:
            model = _small(config)
            for part, module in model.named_modules():
                if isinstance(module, nn.Conv1d):
                    problem = f"carries a state from token to token, and sequence to sequence: {part} is a convolution"
                    raise TrainerError(f"{name} {problem}; {ADVICE}")
                if getattr(module, "rope_type", "") == "longrope":
                    module.rope_type = "default"  # the policy has the context decide, not a row
            randomize(model)
            model.eval()
            alone = [model.base_model(input_ids=ids, use_cache=False)[0] for ids in row.sequences]
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            problem = f"can't be tried: transformers computes no small model with its config ({_short(error)})"
            raise TrainerError(f"{name} {problem}; {ADVICE}") from error
        logits = _logits(model, row.sequences[0], alone[0])
        if logits is None:
            raise TrainerError(
                f"{name} does more to its logits, after the output head, than is done here; {ADVICE}"
            )
        problem = _compare(model, row, alone)
        if not problem:
            return logits
        if problem.startswith(ITS_OWN):
            break
    raise TrainerError(f"{name} {problem}; {ADVICE}")


def _small(config: Any) -> Any:
    """Build a model with all kinds of layers that the config has, but few, narrow and with short windows."""
    config = copy.deepcopy(config)
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and heads > HEADS:
        key_heads = getattr(config, "num_key_value_heads", None)
        if isinstance(key_heads, int):
            config.num_key_value_heads = {heads: HEADS, 1: 1}.get(key_heads, HEADS // 2)
        config.num_attention_heads = HEADS
        config.hidden_size = HEADS * (config.hidden_size // heads)  # heads stay as wide
    layers = config.num_hidden_layers
    kept = min(layers, LAYERS)
    by_layer = []
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == layers and len(set(map(str, value))) < layers:
            by_layer.append(name)
            kept = max(kept, *(value.index(kind) + 1 for kind in value))
        if isinstance(value, list) and name.endswith(WIDTHS):
            setattr(config, name, [min(width, WIDTH) for width in value])
        if type(value) is not int:
            continue
        if name.endswith(WIDTHS) or name.startswith("vocab_size"):
            setattr(config, name, min(value, WIDTH))
        if name in WINDOWS and value > 0:
            setattr(config, name, min(value, WINDOW))
    for name in by_layer:
        setattr(config, name, getattr(config, name)[:kept])
    config.num_hidden_layers = kept
    if getattr(config, "pad_token_id", None) is not None:
        config.pad_token_id = 0
    vars(config).pop("quantization_config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = WINDOW
    auto: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    return auto.from_config(
        config, trust_remote_code=False, attn_implementation="eager", dtype=torch.float32
    )


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Draw weights with which every part of a model matters."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif isinstance(module, nn.Embedding):
                parameter.normal_()
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)


def _compare(model: Any, row: Row, alone: Sequence[Tensor]) -> str:
    """Say what is wrong with a row; "" if nothing is. `alone`: what eager attention gives its sequences."""
    expected_brh = torch.cat([*alone[:2], alone[2][:, SHARED:]], dim=1)
    weights_brh = torch.randn_like(expected_brh)
    expected = _gradients(model, expected_brh, weights_brh)

    def hidden(ids_br: Tensor) -> Tensor:
        return cast(Tensor, model.base_model(**row.segments.inputs(ids_br), use_cache=False)[0])

    if not model._can_set_attn_implementation():  # it would only log that
        return ITS_OWN
    model.set_attn_implementation(attention.NAME)
    evaluates(model)
    try:
        actual_brh = hidden(row.ids_br)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"{ITS_OWN} ({_short(error)})"
    if "groups" not in vars(row.segments):  # no layer has asked for them
        return "does not tell its attention where the sequences of a row begin: it keeps keyword arguments to itself"
    with torch.no_grad():
        again_brh = hidden(row.ids_br)
        changed_brh = hidden(row.changed_br)
        model.eval()
        evaluated_brh = hidden(row.ids_br)
    same = ~row.is_changed
    if not torch.equal(again_brh, actual_brh) or not torch.equal(evaluated_brh, actual_brh):
        return "computes something random while it trains: other numbers at each call, or than in evaluation"
    if not _near(changed_brh[:, same], actual_brh[:, same], CAUSAL):
        return "lets a token see later ones, or other sequences of its row"
    if not _near(actual_brh[:, : SHARED + FIRST], alone[0]):
        return "has more in its attention than is computed here"
    if not _near(actual_brh, expected_brh):
        return (
            "takes a token's place in the row, in place of that in its sequence, for its position"
        )
    actual = _gradients(model, actual_brh, weights_brh)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        # Rounding grows on the way back (Gemma 4: 3e-4), and is that of the largest where numbers cancel.
        if not (actual[name] - gradient).abs().max() <= 10 * TOLERANCE * (
            gradient.abs().max() + 0.02 * largest
        ):
            return f"has other gradients in a row of several sequences than alone (of {name})"
    return ""


def _gradients(model: nn.Module, hidden_brh: Tensor, weights_brh: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a weighted sum by parameter, of those that have one."""
    model.zero_grad()
    (hidden_brh * weights_brh).sum().backward()  # type: ignore[no-untyped-call]
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@torch.no_grad()
def _logits(model: Any, ids_bt: Tensor, hidden_bth: Tensor) -> Logits | None:
    """Find how logits follow from the head's output; None: in no way that is known here."""
    if model.base_model is model:  # it has no head
        return Logits()
    logits = model(input_ids=ids_bt, use_cache=False).logits.double()
    output = model.get_output_embeddings()(hidden_bth).double()
    factor = float((logits * output).sum() / output.square().sum())
    kinds = [Logits(1.0 if abs(factor - 1) < 1e-6 else factor)]
    cap = getattr(model.config, CAP, None)
    if cap:
        kinds.append(Logits(cap=cap))
    return next((kind for kind in kinds if _near(kind.of(output), logits)), None)


def _near(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


def _short(error: Exception) -> str:
    """Return an error's kind and first line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
