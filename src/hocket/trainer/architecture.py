"""Check that an architecture is trained as transformers computes it, with a small model.

It happens before weights are loaded. The small model has all kinds of layers that the config has,
but few and narrow layers, random weights and short windows. Its row is longer than each window and
has three sequences, of which the third shares a prefix with the first. Each sequence must get the
numbers that transformers' own attention ("eager") computes for it alone.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from hocket.errors import TrainerError
from hocket.trainer import attention
from hocket.trainer.attention import ADVICE, Segments
from hocket.trainer.logprobs import Logits

# Largest sizes of the small model. It has more layers if the config has more kinds of layers.
WIDTH = 64  # of feed-forward layers and of the vocabulary
HEADS = 4
LAYERS = 4
WINDOW = 5
# The names in configs of the width of a feed-forward layer, and of lengths from which on a layer
# computes something else.
WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "floor_scale")
# Tokens of the small row.
SHARED = 8  # the prefix that the first and third sequences share
FIRST = 11  # the first sequence behind the prefix
SECOND = 13  # the whole second sequence
THIRD = 9  # the third sequence behind the prefix
# Largest difference in float32, relative to the largest number. docs/reference/models.md has how far
# rounding goes; architectures that compute something else differ by more than .01.
TOLERANCE = 1e-3
# How far later tokens may move a token's numbers: an expert's products round by how many it gets.
CAUSAL = 1e-5
CAP = "final_logit_softcapping"  # name of the cap of logits in configs
SEEDS = 3  # trials; rounding may choose another expert, and other weights then decide
ITS_OWN = "computes attention with code of its own, not through transformers' AttentionInterface"


_tried: dict[str, Logits] = {}  # results by config


def try_small(config: Any) -> Logits:
    """Find how logits follow from the output of the head.

    Raises TrainerError for an architecture that would be trained wrong.
    """
    text = config.get_text_config()
    key = f"{type(text).__name__} {text.to_json_string(use_diff=False)}"
    if key not in _tried:
        # The trial runs on the CPU in float32 with gradients, whatever the caller has set, and
        # leaves the caller's random numbers as they are.
        cpu = torch.device("cpu")
        with (
            torch.random.fork_rng(devices=[]),
            cpu,
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            _tried[key] = _try(text)
    return _tried[key]


def set_evaluation_mode(model: nn.Module) -> None:
    """Turn off dropout, jitter and dropped layers, but leave the recomputation of activations on.

    A model whose training computes something random has other log-probs than the sampler's.
    """
    model.eval()
    for module in model.modules():
        if not isinstance(module, GradientCheckpointingLayer):
            continue
        module.training = True  # transformers recomputes a layer's activations only then
        for name in list(vars(module)):
            if name.endswith("dropout"):
                setattr(module, name, 0.0)


class TrialRow(NamedTuple):
    """A row of three sequences, of which the third shares a prefix with the first."""

    sequences: tuple[Tensor, Tensor, Tensor]  # token ids of each, [1, t]
    segments: Segments
    ids_br: Tensor
    changed_br: Tensor  # other tokens at places that no other place may see
    is_changed: Tensor  # bool [row]

    @classmethod
    def random(cls) -> "TrialRow":
        """Draw the tokens at random."""
        first, second, third = torch.randint(WIDTH, (3, 1, SHARED + FIRST)).unbind()
        second = second[:, :SECOND]
        third = torch.cat([first[:, :SHARED], third[:, :THIRD]], dim=1)
        ids_br, segments = row_of_three((first, second, third), SHARED)

        # Change the last token of each sequence, and the whole second sequence.
        is_changed = torch.zeros(ids_br.shape[1], dtype=torch.bool)
        is_changed[segments.offsets[1:] - 1] = True
        is_changed[SHARED + FIRST : -THIRD] = True
        changed_br = torch.where(is_changed, (ids_br + 1) % WIDTH, ids_br)
        return cls((first, second, third), segments, ids_br, changed_br, is_changed)


def row_of_three(sequences: Sequence[Tensor], shared: int) -> tuple[Tensor, Segments]:
    """Lay three sequences [1, t] into a row [1, r], the third behind a prefix of the first.

    The row has the prefix, `shared` tokens, once. The third sequence's keys are those of the prefix
    and its own.
    """
    first, second, third = sequences
    third = third[:, shared:]
    row_br = torch.cat([first, second, third], dim=1)
    places = torch.arange(row_br.shape[1])
    rest = len(places) - third.shape[1]  # where the third sequence goes on behind the prefix
    key_places = torch.cat([places[:rest], places[:shared], places[rest:]])
    lengths = (first.shape[1], second.shape[1], third.shape[1])
    return row_br, Segments(lengths, row_br.device, (0, 0, shared), key_places)


def _try(config: Any) -> Logits:
    name = type(config).__name__.removesuffix("Config")
    problem = ""
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        row = TrialRow.random()

        # Compute each sequence alone, with transformers' own attention.
        try:
            model = _small_model(config)
            _refuse_convolutions(model, name)
            randomize(model)
            model.eval()
            alone = [model.base_model(input_ids=ids, use_cache=False)[0] for ids in row.sequences]
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise TrainerError(
                f"{name} can't be tried: transformers computes no small model with its config "
                f"({_short(error)}); {ADVICE}"
            ) from error

        logits = _logits(model, row.sequences[0], alone[0])
        if logits is None:
            raise TrainerError(
                f"{name} does more to its logits, after the output head, than is done here; "
                f"{ADVICE}"
            )
        problem = _compare(model, row, alone)
        if not problem:
            return logits
        if problem.startswith(ITS_OWN):  # that is a matter of code, not of weights
            break
    raise TrainerError(f"{name} {problem}; {ADVICE}")


def _refuse_convolutions(model: nn.Module, name: str) -> None:
    """Raise TrainerError for a model with a convolution over tokens, as state-space layers have.

    It would carry the end of a sequence into the next one of the row.
    """
    for part, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            raise TrainerError(
                f"{name} carries a state from token to token, and sequence to sequence: {part} is "
                f"a convolution; {ADVICE}"
            )


def _small_model(config: Any) -> Any:
    """Build a model with all kinds of layers of the config, but few, narrow and short-sighted.

    Its attention is transformers' own.
    """
    config = copy.deepcopy(config)
    _narrow_heads(config)
    _keep_kinds_of_layers(config)

    # Bound the widths of feed-forward layers, the vocabulary and the windows.
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and name.endswith(WIDTHS):  # a width for each layer
            setattr(config, name, [min(width, WIDTH) for width in value])
        if type(value) is not int:
            continue
        if name.endswith(WIDTHS) or name.startswith("vocab_size"):
            setattr(config, name, min(value, WIDTH))
        if name in WINDOWS and value > 0:
            setattr(config, name, min(value, WINDOW))
    rope = getattr(config, "rope_parameters", None) or {}
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = WINDOW

    # The padding token must be within the vocabulary, and the weights are not quantized.
    if getattr(config, "pad_token_id", None) is not None:
        config.pad_token_id = 0
    vars(config).pop("quantization_config", None)

    auto: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    model = auto.from_config(
        config, trust_remote_code=False, attn_implementation="eager", dtype=torch.float32
    )
    for module in model.modules():
        if getattr(module, "rope_type", "") == "longrope":
            module.rope_type = "default"  # in a Policy the context decides, not the row
    return model


def _narrow_heads(config: Any) -> None:
    """Leave at most HEADS heads, each as wide as before."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads <= HEADS:
        return
    key_heads = getattr(config, "num_key_value_heads", None)
    if isinstance(key_heads, int):
        # As many as query heads, or one, or some between.
        config.num_key_value_heads = {heads: HEADS, 1: 1}.get(key_heads, HEADS // 2)
    config.num_attention_heads = HEADS
    config.hidden_size = HEADS * (config.hidden_size // heads)


def _keep_kinds_of_layers(config: Any) -> None:
    """Leave the first layers of the config: LAYERS, or as many as have all kinds of layers."""
    num_layers = config.num_hidden_layers
    kept = min(num_layers, LAYERS)
    kinds_by_name = {}
    for name, value in list(vars(config).items()):
        # A list has the kind of each layer if it is as long, and not all of its elements differ.
        is_by_layer = isinstance(value, list) and len(value) == num_layers
        if is_by_layer and len(set(map(str, value))) < num_layers:
            kinds_by_name[name] = value
            for kind in value:
                kept = max(kept, value.index(kind) + 1)  # the first layer of this kind
    for name, kinds in kinds_by_name.items():
        setattr(config, name, kinds[:kept])
    config.num_hidden_layers = kept


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Draw weights with which every part of a model matters."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.ndim < 2:  # a bias, or the weights of a norm
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif isinstance(module, nn.Embedding):
                parameter.normal_()
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)


def _compare(model: Any, row: TrialRow, alone: Sequence[Tensor]) -> str:
    """Name the first problem of the model with a row, or return "" if it has none.

    Args:
        model: the small model, with transformers' own attention; hocket's is set here.
        row: the sequences in a row.
        alone: the hidden states of each sequence, computed alone.
    """
    # What the row should give, and the gradients of a random weighted sum.
    expected_brh = torch.cat([alone[0], alone[1], alone[2][:, SHARED:]], dim=1)
    weights_brh = torch.randn_like(expected_brh)
    expected = _gradients(model, expected_brh, weights_brh)

    def hidden(ids_br: Tensor) -> Tensor:
        return cast(Tensor, model.base_model(**row.segments.inputs(ids_br), use_cache=False)[0])

    # Does its attention take another implementation, and the segments of a row?
    if not model._can_set_attn_implementation():  # set_attn_implementation would only log that
        return ITS_OWN
    model.set_attn_implementation(attention.NAME)
    set_evaluation_mode(model)
    try:
        actual_brh = hidden(row.ids_br)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"{ITS_OWN} ({_short(error)})"
    if "groups" not in vars(row.segments):  # `attend` caches them there where it gets the segments
        return (
            "does not tell its attention where the sequences of a row begin: it keeps keyword "
            "arguments to itself"
        )

    # Does it compute the same each time, as in evaluation, and see no later tokens?
    with torch.no_grad():
        again_brh = hidden(row.ids_br)
        changed_brh = hidden(row.changed_br)
        model.eval()
        evaluated_brh = hidden(row.ids_br)
    if not torch.equal(again_brh, actual_brh) or not torch.equal(evaluated_brh, actual_brh):
        return (
            "computes something random while it trains: other numbers at each call, or than in "
            "evaluation"
        )
    is_kept = ~row.is_changed
    if not _near(changed_brh[:, is_kept], actual_brh[:, is_kept], CAUSAL):
        return "lets a token see later ones, or other sequences of its row"

    # Are its numbers those of the sequences alone? The first sequence has the positions that it has
    # alone, so an error in it is no matter of positions.
    if not _near(actual_brh[:, : SHARED + FIRST], alone[0]):
        return "has more in its attention than is computed here"
    if not _near(actual_brh, expected_brh):
        return (
            "takes a token's place in the row, in place of that in its sequence, for its position"
        )

    name = _differing_gradient(_gradients(model, actual_brh, weights_brh), expected)
    if name:
        return f"has other gradients in a row of several sequences than alone (of {name})"
    return ""


def _gradients(model: nn.Module, hidden_brh: Tensor, weights_brh: Tensor) -> dict[str, Tensor]:
    """Compute the gradients of a weighted sum of the hidden states, by parameter that has one."""
    model.zero_grad()
    (hidden_brh * weights_brh).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    return gradients


def _differing_gradient(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Name the first parameter whose gradient is wrong, or return "".

    Rounding grows on the way back (Gemma 4: 3e-4). Where numbers cancel, the rounding error is that
    of the largest gradients, so a share of these is added to the bound.
    """
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        bound = 10 * TOLERANCE * (gradient.abs().max() + 0.02 * largest)
        is_near = (actual[name] - gradient).abs().max() <= bound  # False for nan
        if not is_near:
            return name
    return ""


@torch.no_grad()
def _logits(model: Any, ids_bt: Tensor, hidden_bth: Tensor) -> Logits | None:
    """Find how logits follow from the output of the head; None if neither factor nor cap fits."""
    if model.base_model is model:  # the model has no head
        return Logits()
    logits = model(input_ids=ids_bt, use_cache=False).logits.double()
    output = model.get_output_embeddings()(hidden_bth).double()

    # The factor that fits best, by least squares.
    factor = float((logits * output).sum() / output.square().sum())
    candidates = [Logits(1.0 if abs(factor - 1) < 1e-6 else factor)]
    cap = getattr(model.config, CAP, None)
    if cap:
        candidates.append(Logits(cap=cap))
    for candidate in candidates:
        if _near(candidate.of(output), logits):
            return candidate
    return None


def _near(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


def _short(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
