"""Compare the weight files of a model folder with its config.json, by the files' headers.

Transformers draws at random what the files lack, and drops what the model lacks. So transformers
loads a model on the meta device, from tensors that have only a name and a shape, and its report is
read: it knows the names of every architecture, how they changed, and which tensors it ignores on
purpose.
"""

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

SINGLE = ("model.safetensors", "pytorch_model.bin")  # in transformers' order of looking for them
LFS = b"version https://git-lfs"  # how a pointer of git-lfs begins
HEADS = ("lm_head.weight", "score.weight")  # heads of language models and of classifiers
NUM_NAMED = 3  # the most tensors or files that a message names
ROWS = 4096  # rows of a matrix that are compared at a time
AGAIN = "copy or download it again"
Shapes = Mapping[str, tuple[int, ...]]  # shape of each tensor
_DAMAGES = (  # what readers raise for a file that is cut off or damaged
    ValueError,
    KeyError,
    TypeError,
    struct.error,
    RuntimeError,
    EOFError,
    OSError,
)


class Loaded(NamedTuple):
    """A model on the meta device, and transformers' report of what loading its files would do."""

    model: Any
    report: Mapping[str, Any]


def local_file(path: str, name: str) -> Path | None:
    """Find a file of a model in its folder, or in the hub's cache; None where there is none."""
    from huggingface_hub import try_to_load_from_cache

    if Path(path).is_dir():
        file = Path(path, name)
        return file if file.exists() else None
    cached = try_to_load_from_cache(path, name)
    return Path(cached) if isinstance(cached, str) else None


def weight_files(path: str) -> tuple[list[Path], list[str]]:
    """Find the weight files that transformers would load.

    Returns the files, none where the folder or the hub's cache has none yet, and sentences that say
    what is wrong with them.
    """
    # A whole file goes before an index of shards, as in transformers.
    for name in SINGLE:
        whole = local_file(path, name)
        index = local_file(path, f"{name}.index.json")
        if whole is not None:
            return [whole], _second_set(whole, index)
        if index is not None:
            return _shards(index)
    return [], []


def _second_set(whole: Path, index: Path | None) -> list[str]:
    """Word the problem of shards beside a whole file: transformers loads it, vLLM the shards."""
    others = [] if index is None else [index]
    if whole.suffix == ".safetensors":
        others += sorted(whole.parent.glob("model-*-of-*.safetensors"))
    if not others:
        return []
    return [
        f"it has {whole.name} beside {others[0].name}, which are two sets of weights; remove the "
        "one that is not meant"
    ]


def _shards(index: Path) -> tuple[list[Path], list[str]]:
    """List the files that an index names, and what is wrong with the index."""
    if is_pointer(index):
        return [], [pointer(index)]
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(content["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        return [], [f"{index.name} is no index of weight files; {AGAIN}"]
    files = [index.with_name(name) for name in names]
    lacking = [file.name for file in files if not file.exists()]
    if lacking:
        return [], [f"{index.name} names {_listed(lacking)}, which the folder lacks; {AGAIN}"]
    return files, []


def is_pointer(file: Path) -> bool:
    """Check whether a file is only a pointer of git-lfs, whose content was not fetched."""
    with file.open("rb") as opened:
        return opened.read(len(LFS)) == LFS


def pointer(file: Path) -> str:
    """Word the problem of a file that is a pointer."""
    return f"{file.name} is a pointer of git-lfs in place of the file; fetch it with: git lfs pull"


def read_headers(files: Iterable[Path]) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Read the names and shapes of the tensors in weight files.

    Returns the shapes, and sentences that say what is wrong with the files.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    problems = []
    for file in files:
        if is_pointer(file):
            problems.append(pointer(file))
            continue
        try:
            if file.suffix == ".safetensors":
                shapes |= _safetensors(file)
            else:
                for name, tensor in _unpickled(file, "meta").items():
                    shapes[name] = tuple(tensor.shape)
        except _DAMAGES as error:
            cause = str(error).splitlines()[0]
            problems.append(f"{file.name} is cut off or damaged ({cause}); {AGAIN}")
    return shapes, problems


def _safetensors(file: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes from the header of a safetensors file.

    The header is its length in 8 bytes, then {name: {dtype, shape, data_offsets}} as JSON; the
    tensors' bytes follow. Raises ValueError where the file is not as long as the header says.
    """
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        size = file.stat().st_size
        if length > size:
            raise ValueError(f"its header takes {length:,} bytes, the file has {size:,}")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    ends = [entry["data_offsets"][1] for entry in header.values()]
    promised = 8 + length + max(ends, default=0)
    if promised != size:
        raise ValueError(f"its header promises {promised:,} bytes, the file has {size:,}")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def _unpickled(file: Path, device: str) -> "dict[str, torch.Tensor]":
    """Load a file of torch.save, without running code from it. Raises ValueError if it has some."""
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
    """Load a model without weights, from the names and shapes of the tensors in its files.

    `classifier`: with the head of one. Raises OSError or ValueError as transformers does.
    """
    import torch
    import transformers

    # A model's own code is not run; with None, the default, transformers asks on the terminal.
    config = transformers.AutoConfig.from_pretrained(
        path, trust_remote_code=False, local_files_only=True
    )
    config.__dict__.pop("quantization_config", None)  # else it needs the quantizer's package
    auto: Any = transformers.AutoModelForCausalLM
    if classifier:
        auto = transformers.AutoModelForSequenceClassification
    elif hasattr(config, "vision_config"):
        auto = transformers.AutoModelForImageTextToText

    with _quiet_transformers():
        with torch.device("meta"):
            empty = auto.from_config(config, trust_remote_code=False)
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        try:
            # Without a path, transformers looks for no files, adapters among them.
            model, report = type(empty).from_pretrained(
                None,
                config=empty.config,
                state_dict=tensors,
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except RuntimeError:
            # transformers joins some tensors, such as those of experts, and their shapes differ.
            return Loaded(empty, _own_report(empty, shapes))
    return Loaded(model, report)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Have transformers print nothing: its report is read, not printed."""
    import transformers

    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


def _own_report(model: Any, shapes: Shapes) -> dict[str, Any]:
    """Make a report as transformers does, by the names and shapes that the model is saved with.

    It stands in where transformers can't load the tensors at all.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tensors = revert_weight_conversion(model, model.state_dict())
    saved = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    common = saved.keys() & shapes.keys()
    differ = [(name, shapes[name], saved[name]) for name in common if shapes[name] != saved[name]]
    missing = saved.keys() - shapes.keys() - model.all_tied_weights_keys.keys()
    return {"missing_keys": missing, "unexpected_keys": (), "mismatched_keys": differ}


def differences(report: Mapping[str, Any], *, head: bool = True) -> list[str]:
    """Word a report of transformers: tensors that lack, are too many, or have another shape.

    `head`: whether the model's head is used. If not, the files may have none, or another kind.
    """

    def is_used(name: str) -> bool:
        return head or not name.endswith(HEADS)

    missing = sorted(filter(is_used, report["missing_keys"]))
    unexpected = sorted(filter(is_used, report["unexpected_keys"]))
    mismatched = [keys for keys in report["mismatched_keys"] if is_used(keys[0])]
    problems = []
    if missing:
        advice = "copy or download its files again, or take the config.json that belongs to them"
        if missing == ["lm_head.weight"]:
            advice = (
                "set tie_word_embeddings to true in config.json if its embedding is its head, or "
                "add the head"
            )
        problems.append(
            f"its files lack {_listed(missing)}, which transformers would draw at random; {advice}"
        )
    if unexpected:
        problems.append(
            f"its files have {_listed(unexpected)}, which the model of config.json lacks and would "
            "lose; take the config.json that belongs to them, or save the model without them"
        )
    if mismatched:
        name, in_file, in_model = min(mismatched)
        more = ""
        if len(mismatched) > 1:
            more = f", and {len(mismatched) - 1} more tensors differ so"
        problems.append(
            f"its files have {name} in the shape {list(in_file)}, config.json says "
            f"{list(in_model)}{more}; take the config.json that belongs to them"
        )
    return problems


def untied(loaded: Loaded, files: Sequence[Path], shapes: Shapes) -> list[str]:
    """Name the tensors that differ in the files although config.json ties them.

    Transformers would train both, and vLLM would serve the first.
    """
    from transformers.core_model_loading import revert_weight_conversion

    problems = []
    # A pair is (a tensor, the one that config.json ties it to), by the names in transformers'
    # model; names in the files may be others.
    for pair in loaded.model.all_tied_weights_keys.items():
        parameters = {name: loaded.model.get_parameter(name) for name in pair}
        published = revert_weight_conversion(loaded.model, parameters)
        names = [_name_in_files(name, shapes) for name in published]
        in_files = [name for name in names if name is not None]
        if len(names) != 2 or len(in_files) != 2:
            continue  # the files do not have one tensor for each
        first, second = in_files
        if _equal(files, first, second):
            continue
        problems.append(
            f"config.json ties {first} to {second}, but its files have different ones; set "
            "tie_word_embeddings to false in config.json if both were trained, or save the model "
            "without the first"
        )
    return problems


def _name_in_files(name: str, shapes: Shapes) -> str | None:
    """Find a tensor's name in the files, where it may have a longer or shorter prefix."""
    for in_file in shapes:
        if f".{in_file}".endswith(f".{name}") or f".{name}".endswith(f".{in_file}"):
            return in_file
    return None


def _equal(files: Sequence[Path], first: str, second: str) -> bool:
    """Compare two tensors of the files, some rows at a time."""
    if first == second:
        return True
    pairs = zip(_rows(files, first), _rows(files, second), strict=True)
    return all(bool((rows.float() == others.float()).all()) for rows, others in pairs)


def _rows(files: Sequence[Path], name: str) -> "Iterable[torch.Tensor]":
    """Yield a matrix of the files in parts of at most `ROWS` rows."""
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
    """List the first names, and how many more there are."""
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more
