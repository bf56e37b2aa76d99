"""Reading parameters that a stranger may have written: no code of the file runs, and no array takes memory before its
size is known to be the model's.

`load_checked` reads what consists of tensors, numbers, texts and containers: evodsp's checkpoints. `load_untrusted` reads
files of other programs too.

A pickle names classes and functions, and unpickling calls them. torch's `weights_only` unpickler refuses every unknown name,
and so it refuses OpenFold's training checkpoints, whose hyperparameters are `ml_collections.ConfigDict` objects. Here an
inert class stands in for each unknown name: it accepts any arguments and any state, and discards them. The module that a
name belongs to is never imported, so no code of the file can run. Tensors, numbers, strings and containers are read as
usual.

The library compares what the header says with the file's size, and maps the arrays into memory, so that none takes any
before it is used.

Other programs wrap a model, or parts of it, before they save it: the names of its arrays then have further parts.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from evodsp.config import ModelConfig
from evodsp.errors import FileFormatError, UserError, nearest
from evodsp.model.alphafold import AlphaFold
from evodsp.printing import quoted, shown

_HOSTILE_MODULES = (
    *("os", "posix", "nt", "sys", "subprocess", "pty", "shutil", "socket"),
    *("importlib", "runpy", "ctypes", "code", "pickle"),
)
_HOSTILE_BUILTINS = (
    *("__import__", "breakpoint", "compile", "delattr", "eval", "exec", "getattr", "globals", "input"),
    *("locals", "open", "setattr", "vars"),
)
"""No training program stores anything of these modules, or these functions; a file that names one was made to run commands."""


def load_checked(file: Path | bytes) -> Any:
    """Content of a file of `torch.save` (a path, or its bytes), on the CPU; of a path, memory-mapped.

    Raises any exception if it is damaged or holds other objects than tensors, numbers, texts and containers.
    """
    is_content = isinstance(file, bytes)
    opened = io.BytesIO(file) if isinstance(file, bytes) else str(file)
    return torch.load(opened, map_location="cpu", weights_only=True, mmap=not is_content)


class Inert:
    """Takes the place of an object whose class is unknown. It keeps nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _InertDict:
    """Takes the place of a dictionary of an unknown class. torch's unpickler fills dictionaries of three types only."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict()


def load_untrusted(path: Path) -> Any:
    """Content of a file of `torch.save`, on the CPU, memory-mapped; objects of unknown classes are `Inert` objects.

    Raises UserError if the file names functions that only an attack needs, or is damaged.
    """
    try:
        names = get_unsafe_globals_in_checkpoint(path)
        if hostile := sorted(name for name in names if _is_hostile(name)):
            raise UserError(
                f"{path}: asks to call '{quoted(hostile[0])}' when it is read; nothing was run, but do not trust this file"
            )
        with safe_globals([_stand_in(name) for name in names]):
            return load_checked(path)
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise UserError(
            f"{path}: not a readable checkpoint: damaged, or with objects that evodsp cannot skip; "
            "save its dictionary of parameters alone, with torch.save"
        ) from error


def _is_hostile(name: str) -> bool:
    """Whether only a file that was made to run commands names this. Its stand-in would be inert; the user should still know."""
    module, _, attribute = name.rpartition(".")
    return attribute in _HOSTILE_BUILTINS if module == "builtins" else name.partition(".")[0] in _HOSTILE_MODULES


def _stand_in(name: str) -> type:
    """A new empty class that the unpickler takes for `name` (module and class, joined by dots)."""
    module, _, attribute = name.rpartition(".")
    parent = _InertDict if attribute.lower().endswith("dict") else Inert
    return type(attribute, (parent,), {"__module__": module, "__qualname__": attribute})


def foreign(file: str | Path | io.BytesIO) -> list[str]:
    """The classes and functions in a file of `torch.save` that are not read, such as 'datetime.date'. Sorted.

    None of a file that is damaged, or of another kind.
    """
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # a damaged file can raise any exception
        return []


def refuse_foreign(path: str | Path) -> None:
    """Raise UserError if a checkpoint, which could not be read, holds such objects."""
    if names := foreign(path):
        raise UserError(
            f"{path}: not a readable checkpoint: it holds {', '.join(names)}, which evodsp does not read because it could run "
            "a stranger's code; give one without them. If a callback of yours wrote it, call "
            "torch.serialization.add_safe_globals in the callback's file, and let its state_dict return only numbers, strings, "
            "lists, dictionaries and tensors"
        )


def map_tensors(path: Path, fix: str) -> dict[str, Tensor]:
    """The arrays of a safetensors file, on the CPU, mapped into memory.

    `fix` ends the message of the FileFormatError for any other file, and for one that is cut short or too long.
    """
    try:
        with safe_open(path, framework="pt") as arrays:
            return {name: arrays.get_tensor(name) for name in arrays.keys()}  # noqa: SIM118, it is no dictionary
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError, AttributeError, TypeError) as error:
        raise FileFormatError(path, f"not a readable safetensors file ({quoted(error)}); {fix}") from error


_MOST_REPEATS = 512
"""Most blocks of one kind. AlphaFold2 has 48."""
_WRAPPERS = frozenset(
    ("module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module", "_checkpoint_wrapped_module", "_fpw_module")
)
"""Parts of names that DataParallel, DeepSpeed, torch.compile, FSDP, Fabric and recomputation add, and that no model has."""


def on_meta(config: ModelConfig, source: str) -> AlphaFold:
    """The model without storage: its parameters' names and shapes. `source`: whose sizes they are, for messages.

    Raises UserError for sizes that no model can have.
    """
    structure = config.structure_module
    repeats = {
        "evoformer.blocks": config.evoformer.blocks,
        "extra_msa.blocks": config.extra_msa.blocks,
        "templates.blocks": config.templates.blocks,
        "structure_module.angle_blocks": structure.angle_blocks,
        "structure_module.transition_layers": structure.transition_layers,
        "structure_module.iterations": structure.iterations,
    }
    for name, count in repeats.items():
        if count > _MOST_REPEATS:
            raise UserError(f"{source}: {name} is {shown(count)}, but no model has more than {_MOST_REPEATS}")
    try:
        with torch.device("meta"):
            return AlphaFold(config)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except Exception as error:  # torch's own, of sizes beyond its numbers
        raise UserError(f"{source}: unreadable model sizes: {quoted(error)}") from error


def check_weights(model: AlphaFold, weights: Mapping[str, Tensor], source: str) -> None:
    """Raise UserError unless `weights` are the parameters of a model, which may be `on_meta`, by name and shape."""
    check_arrays(weights, {name: tuple(value.shape) for name, value in model.state_dict().items()}, source)


def unwrapped(arrays: Mapping[Any, Any], source: str) -> dict[str, Any]:
    """The entries of a file by the names that they have in the model alone. Raises UserError if two have the same."""
    found: dict[str, str] = {}
    for key in map(str, arrays):
        name = model_name(key)
        if name in found:
            raise UserError(f"{source}: holds '{found[name]}' and '{key}', two names of one array; remove one")
        found[name] = key
    return dict(zip(found, arrays.values(), strict=True))


def model_name(key: str) -> str:
    """The name of an array without what wrappers add, and without the `model` that Lightning's modules have around a model."""
    parts = [part for part in key.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["model"] else parts)


def check_finite(arrays: Mapping[str, np.ndarray | Tensor], source: str | Path) -> None:
    """Raise UserError that names the first array which holds a number that is not finite, as float32."""
    for name, value in arrays.items():
        if not (value.float().isfinite() if isinstance(value, Tensor) else _finite(value)).all():
            raise UserError(
                f"{source}: '{quoted(name)}' holds numbers that are not finite; give another file of weights"
            )


def _finite(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.isfinite(array.astype(np.float32, copy=False))


def is_array(value: Any) -> bool:
    """Whether a value of a file is a plain array of floats with numbers of its own."""
    plain = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    return plain and value.is_floating_point()


def check_bytes(arrays: Mapping[str, Tensor], path: str | Path) -> None:
    """Raise UserError if the arrays of a file of `torch.save` are larger than the file: some repeat the same few numbers."""
    if sum(value.numel() * value.element_size() for value in arrays.values()) > Path(path).stat().st_size:
        raise UserError(
            f"{path}: not a readable checkpoint: its arrays claim to be larger than the file; do not trust it"
        )


def check_arrays(
    arrays: Mapping[str, np.ndarray | Tensor],
    expected: Mapping[str, tuple[int, ...]],
    source: str,
    shown: Callable[[str], str] = str,
) -> None:
    """Raise UserError that names the first array which is missing, unknown or of another shape, and both shapes.

    `expected`: shape of each array of the model. `source`: the file, for the message. `shown`: translates a name of `expected`
    into the name that the file uses.
    """
    if missing := sorted(expected.keys() - arrays.keys()):
        key = missing[0]
        others = [shown(name) for name in arrays.keys() - expected.keys()]
        raise UserError(
            f"{source}: no array '{shown(key)}' of shape {expected[key]}{_and_more(missing)}."
            f"{nearest(shown(key), others)} Is it another model's file?"
        )
    if unknown := sorted(arrays.keys() - expected.keys()):
        key = unknown[0]
        raise UserError(
            f"{source}: the model has no parameter for array '{shown(key)}' of shape {tuple(arrays[key].shape)}"
            f"{_and_more(unknown)}; is it another model's file?"
        )
    if misshapen := [key for key, shape in expected.items() if tuple(arrays[key].shape) != shape]:
        key = misshapen[0]
        raise UserError(
            f"{source}: array '{shown(key)}' has the shape {tuple(arrays[key].shape)}, but the model needs "
            f"{expected[key]}{_and_more(misshapen)}; is it another model's file?"
        )


def check_arrangement(config: ModelConfig, chains: bool, source: str) -> None:
    """Raise UserError unless the model is one of chains where a file's is. `chains`: whether the file's is a multimer's."""
    found = "multimer" if chains else "monomer"
    if found != config.arrangement:
        wanted = "model_1_multimer_v3" if chains else "model_1_ptm"
        raise UserError(
            f"{source}: holds a {found} model, but the model's arrangement is {config.arrangement}; give another file, or "
            f"the preset of a {found} model, such as {wanted}"
        )


def _and_more(keys: list[str]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
