"""Models of other programs' parameter files: DeepMind's `.npz` and OpenFold's `.pt`, told apart by their content.

Such files hold no sizes. They are those of a preset, which the file's name or the user says, with as many blocks in each stack
as the arrays have; or those that `load_parameters` is told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights import deepmind, openfold
from evodsp.weights.config import preset_of
from evodsp.weights.container import container


def is_parameter_file(path: str | Path) -> bool:
    """Whether this is DeepMind's or OpenFold's file; False for evodsp's checkpoints and for whatever cannot be read."""
    kind = container(Path(path))
    if kind != "torch":
        return kind == "npz"
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # a damaged file's pickle raises whatever its reader stumbles over
        return False
    return openfold.is_openfold(content) and "format_version" not in content


def load_published(path: str | Path, preset: str | None = None, raw: bool = False) -> tuple[AlphaFold, int]:
    """The model of a parameter file with a preset's sizes (None: as its name says), and how many arrays the file has.

    Stacks may differ in length from the preset's. Raises UserError if the file is none or not exactly that of the model.
    """
    return load_parameters(path, ModelConfig.preset(preset or preset_of(Path(path))), raw, any_depth=True)


def load_parameters(
    path: str | Path, config: ModelConfig, raw: bool = False, any_depth: bool = False
) -> tuple[AlphaFold, int]:
    """The model of a parameter file with these sizes, and how many arrays the file has.

    `raw`: of OpenFold's training checkpoints the weights of the last step instead of their moving average. `any_depth`: with as
    many blocks in each stack as the arrays have. Raises UserError if the file is none or not exactly that of the model.
    """
    path = Path(path)
    kind = container(path)
    if path.is_file() and kind is None:
        raise UserError(f"{path}: neither DeepMind's .npz nor OpenFold's .pt (or cut short); give one of these")
    if kind == "npz":
        arrays = deepmind.read_npz(path)
        model = AlphaFold(deepmind.with_blocks_of(config, arrays) if any_depth else config)
        deepmind.set_parameters(model, arrays, str(path))
        return model, len(arrays)
    tensors = openfold.read_openfold(path, raw)
    model = AlphaFold(openfold.with_blocks_of(config, tensors) if any_depth else config)
    openfold.set_parameters(model, tensors, str(path))
    return model, len(tensors)
