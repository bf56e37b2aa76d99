"""Reading safetensors files: the only place that opens those of models. They hold arrays by name, and nothing that could run.

The library compares what the header says with the file's size, and maps the arrays into memory, so that none takes any before
it is used.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from evodsp.errors import FileFormatError
from evodsp.reading.quoting import quoted


def map_tensors(path: Path, fix: str) -> dict[str, Tensor]:
    """The arrays of a safetensors file, on the CPU, mapped into memory.

    `fix` ends the message of the FileFormatError for any other file, and for one that is cut short or too long.
    """
    try:
        with safe_open(path, framework="pt") as arrays:
            return {name: arrays.get_tensor(name) for name in arrays.keys()}  # noqa: SIM118, it is no dictionary
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError, AttributeError, TypeError) as error:
        raise FileFormatError(path, f"not a readable safetensors file ({quoted(error)}); {fix}") from error
