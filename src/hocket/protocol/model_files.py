"""Compare the weight files of a model folder with its config.json, by their headers: no weights are read.

Transformers draws at random what the files lack, and drops what the model lacks. So it is asked to load a model on the
meta device from tensors that have only a name and a shape, and its report is read: it knows the names of every
architecture, how they changed, and which tensors it ignores on purpose.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

SINGLE = (
    "model.safetensors",
    "pytorch_model.bin",
)  # in the order in which transformers looks for them
LFS = b"version https://git-lfs"  # how a pointer of git-lfs begins
HEADS = ("lm_head.weight", "score.weight")  # of language models and of classifiers
NUM_NAMED = 3  # tensors that a message names
ROWS = 4096  # of a matrix that are compared at a time
AGAIN = "copy or download it again"
Shapes = Mapping[str, tuple[int, ...]]


class Loaded(NamedTuple):
    """A model on the meta device, and transformers' report of what loading its files would do."""

    model: Any
    report: Mapping[str, Any]


def local_file(path: str, name: str) -> Path | None:
    """Find a file of a model's folder, or of what the hub's cache holds of it; None where there is none."""
    from huggingface_hub import try_to_load_from_cache

    if Path(path).is_dir():
        file = Path(path, name)
        return file if file.exists() else None
    cached = try_to_load_from_cache(path, name)
    return Path(cached) if isinstance(cached, str) else None


def weight_files(path: str) -> tuple[list[Path], list[str]]:
    """Find the files that transformers would load, and what is wrong with them.

    Returns no files where the folder, or the hub's cache, has none yet.
    """
    for name in SINGLE:
        whole = local_file(path, name)
        index = local_file(path, f"{name}.index.json")
        if whole is not None:
            return [whole], _stale(whole, index)
        if index is not None:
            return _shards(index)
    return [], []


def _stale(whole: Path, index: Path | None) -> list[str]:
    """Refuse shards beside a whole file: transformers loads the file, vLLM loads the shards."""
    shards = (
        sorted(whole.parent.glob("model-*-of-*.safetensors"))
        if whole.suffix == ".safetensors"
        else []
    )
    others = [file.name for file in (index, *shards) if file is not None]
    if not others:
        return []
    return [
        f"it has {whole.name} beside {others[0]}, which are two sets of weights; remove the one that is not meant"
    ]


def _shards(index: Path) -> tuple[list[Path], list[str]]:
    if is_pointer(index):
        return [], [pointer(index)]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        return [], [f"{index.name} is no index of weight files; {AGAIN}"]
    files = [index.with_name(name) for name in names]
    lacking = [file.name for file in files if not file.exists()]
    if lacking:
        return [], [f"{index.name} names {_listed(lacking)}, which the folder lacks; {AGAIN}"]
    return files, []


def is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(LFS)) == LFS


def pointer(file: Path) -> str:
    return f"{file.name} is a pointer of git-lfs in place of the file; fetch it with: git lfs pull"


def read_headers(files: Iterable[Path]) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Read names and shapes of the tensors in weight files, and what is wrong with the files."""
    shapes: dict[str, tuple[int, ...]] = {}
    problems = []
    for file in files:
        if is_pointer(file):
            problems.append(pointer(file))
            continue
        try:
            shapes |= _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
        except (
            ValueError,
            KeyError,
            TypeError,
            struct.error,
            RuntimeError,
            EOFError,
            OSError,
        ) as error:
            problems.append(
                f"{file.name} is cut off or damaged ({str(error).splitlines()[0]}); {AGAIN}"
            )
    return shapes, problems


def _safetensors(file: Path) -> dict[str, tuple[int, ...]]:
    """Read a header: its length in 8 bytes, then {name: {dtype, shape, data_offsets}} as JSON."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        size = file.stat().st_size
        if length > size:
            raise ValueError(f"its header takes {length:,} bytes, the file has {size:,}")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    promised = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if promised != size:
        raise ValueError(f"its header promises {promised:,} bytes, the file has {size:,}")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def _pickled(file: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in _unpickled(file, "meta").items()}


def _unpickled(file: Path, device: str) -> "dict[str, torch.Tensor]":
    import pickle
    import zipfile

    import torch

    try:
        tensors: dict[str, torch.Tensor] = torch.load(
            file, map_location=device, mmap=zipfile.is_zipfile(file), weights_only=True
        )
    except pickle.UnpicklingError as error:
        raise ValueError(error) from error
    return tensors


def load_on_meta(path: str, shapes: Shapes, *, classifier: bool = False) -> Loaded:
    """Load a model without weights from what its files hold. Raises OSError or ValueError as transformers does."""
    import torch
    import transformers

    # Code of its own is not run: None, the default, asks on the terminal.
    config = transformers.AutoConfig.from_pretrained(
        path, trust_remote_code=False, local_files_only=True
    )
    config.__dict__.pop("quantization_config", None)
    auto: Any = transformers.AutoModelForCausalLM
    if classifier:
        auto = transformers.AutoModelForSequenceClassification
    elif hasattr(config, "vision_config"):
        auto = transformers.AutoModelForImageTextToText
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # its report is read here
    try:
        with torch.device("meta"):
            empty = auto.from_config(config, trust_remote_code=False)
        # Without a path, transformers looks for no files, adapters among them.
        model, report = type(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict={name: torch.empty(shape, device="meta") for name, shape in shapes.items()},
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (
        RuntimeError
    ):  # parts that are joined to one tensor, experts for one, do not fit together
        return Loaded(empty, _by_name(empty, shapes))
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    return Loaded(model, report)


def _by_name(model: Any, shapes: Shapes) -> dict[str, Any]:
    """Compare names and shapes with those that the model would be saved with."""
    from transformers.core_model_loading import revert_weight_conversion

    saved = {
        name: tuple(tensor.shape)
        for name, tensor in revert_weight_conversion(model, model.state_dict()).items()
    }
    differ = [
        (name, shapes[name], saved[name])
        for name in saved.keys() & shapes.keys()
        if shapes[name] != saved[name]
    ]
    missing = saved.keys() - shapes.keys() - model.all_tied_weights_keys.keys()
    return {"missing_keys": missing, "unexpected_keys": (), "mismatched_keys": differ}


def differences(report: Mapping[str, Any], *, head: bool = True) -> list[str]:
    """Say what a report of transformers names: tensors that lack, that are too many, or of another shape.

    head: whether the model's head is used. Without it, the files may have none, or one of another kind.
    """
    unused = () if head else HEADS
    missing = sorted(name for name in report["missing_keys"] if not name.endswith(unused))
    unexpected = sorted(name for name in report["unexpected_keys"] if not name.endswith(unused))
    shapes = sorted(
        triple for triple in report["mismatched_keys"] if not triple[0].endswith(unused)
    )
    problems = []
    if missing:
        advice = "copy or download its files again, or take the config.json that belongs to them"
        if missing == ["lm_head.weight"]:
            advice = "set tie_word_embeddings to true in config.json if its embedding is its head, or add the head"
        problems.append(
            f"its files lack {_listed(missing)}, which transformers would draw at random; {advice}"
        )
    if unexpected:
        problems.append(
            f"its files have {_listed(unexpected)}, which the model of config.json lacks and would lose; "
            "take the config.json that belongs to them, or save the model without them"
        )
    if shapes:
        name, in_file, in_model = shapes[0]
        more = f", and {len(shapes) - 1} more tensors differ so" if len(shapes) > 1 else ""
        problems.append(
            f"its files have {name} in the shape {[*in_file]}, config.json says {[*in_model]}{more}; "
            "take the config.json that belongs to them"
        )
    return problems


def untied(loaded: Loaded, files: Sequence[Path], shapes: Shapes) -> list[str]:
    """Say which tensors differ although config.json ties them: transformers trains both, vLLM serves the first."""
    from transformers.core_model_loading import revert_weight_conversion

    problems = []
    for pair in loaded.model.all_tied_weights_keys.items():
        parameters = {name: loaded.model.get_parameter(name) for name in pair}
        published = revert_weight_conversion(loaded.model, parameters)
        stored = [_stored(name, shapes) for name in published]
        if len(stored) == 2 and None not in stored and not _equal(files, *stored):
            problems.append(
                f"config.json ties {stored[0]} to {stored[1]}, but its files have different ones; set "
                "tie_word_embeddings to false in config.json if both were trained, or save the model without the first"
            )
    return problems


def _stored(name: str, shapes: Shapes) -> str | None:
    """Find the name of a tensor in the files, which may have a prefix more or less."""
    return next(
        (
            tensor
            for tensor in shapes
            if f".{tensor}".endswith(f".{name}") or f".{name}".endswith(f".{tensor}")
        ),
        None,
    )


def _equal(files: Sequence[Path], first: Any, second: Any) -> bool:
    if first == second:
        return True
    for ours, theirs in zip(_rows(files, first), _rows(files, second), strict=True):
        if not (ours.float() == theirs.float()).all():
            return False
    return True


def _rows(files: Sequence[Path], name: str) -> "Iterable[torch.Tensor]":
    """Yield a matrix in parts."""
    from safetensors import safe_open

    for file in files:
        if file.suffix != ".safetensors":
            tensors = _unpickled(file, "cpu")
            if name in tensors:
                matrix = tensors[name]
                for start in range(0, len(matrix), ROWS):
                    yield matrix[start : start + ROWS]
            continue
        with safe_open(file, framework="pt") as opened:
            if name in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(name)
                for start in range(0, part.get_shape()[0], ROWS):
                    yield part[start : start + ROWS]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more
