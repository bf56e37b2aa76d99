"""Models from other programs' parameter files: DeepMind's `.npz` and OpenFold's checkpoints, told apart by their content.

These files do not hold the model's sizes. The sizes come from a preset, named by the user or by the file's name, with as many
blocks in each stack as the arrays have; or the caller of `load_parameters` gives them.
"""

from __future__ import annotations

from pathlib import Path

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights import deepmind, openfold
from evodsp.weights.config import preset_of
from evodsp.weights.parameter_file import container, parameter_file
from evodsp.weights.pretrained_folder import is_pretrained
from evodsp.weights.sizes import on_meta
from evodsp.weights.untrusted import load_untrusted


def is_parameter_file(path: str | Path) -> bool:
    """Whether `path` is DeepMind's or OpenFold's; False for evodsp's checkpoints and for files that cannot be read.

    Raises UserError if `path` is a folder, but not a DeepSpeed checkpoint that can be read.
    """
    file = parameter_file(path)
    kind = None if is_pretrained(path) else container(file)
    if kind != "torch":
        return kind == "npz"
    try:
        content = load_untrusted(file)
    except UserError:
        return False
    return openfold.is_openfold(content) and "format_version" not in content


def load_published(path: str | Path, preset: str | None = None, raw: bool = False) -> tuple[AlphaFold, int]:
    """The model in a parameter file, and the number of the file's arrays.

    `preset`: the model's sizes; None: as the file's name says. The number of blocks in each stack is the file's.
    `raw` and errors are as in `load_parameters`.
    """
    return load_parameters(path, ModelConfig.preset(preset or preset_of(Path(path))), raw, any_depth=True)


def load_parameters(
    path: str | Path, config: ModelConfig, raw: bool = False, any_depth: bool = False
) -> tuple[AlphaFold, int]:
    """The model of these sizes with the parameters of a file, and the number of the file's arrays.

    `raw`: from OpenFold's training checkpoints take the weights of the last step instead of their moving average. `any_depth`:
    take the number of blocks in each stack from the file. Raises UserError if `path` is not a parameter file, or has other
    arrays than the model.
    """
    path = parameter_file(path)
    kind = container(path)
    if path.is_file() and kind is None:
        raise UserError(f"{path}: neither DeepMind's .npz nor OpenFold's .pt (or cut short); give one of these")
    program = deepmind if kind == "npz" else openfold
    arrays = deepmind.read_npz(path) if kind == "npz" else openfold.read_openfold(path, raw)
    config = program.with_blocks_of(config, arrays) if any_depth else config
    program.fitting(on_meta(config, str(path)), arrays, str(path))
    model = AlphaFold(config)
    program.set_parameters(model, arrays, str(path))
    return model, len(arrays)
