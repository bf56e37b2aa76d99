"""evodsp's checkpoints: Lightning's files, with the model's sizes and a format version added. They are read without
Lightning.

Keys that evodsp reads:

- `format_version`;
- `model_config`: nested dictionary of the model's sizes;
- `features`, optional: dictionary of the feature sizes that the model was validated with;
- `state_dict`: raw weights, under names that begin with `model.`;
- `ema_state_dict`, optional: the exponential moving average of the weights.

Everything is tensors, numbers, strings and containers, so files are loaded with `weights_only=True`: a stranger's checkpoint
cannot run code. A folder of `evodsp.weights.parameter_file` holds the same entries, and is read as a checkpoint without an
average.

Files of other programs, DeepMind's `.npz` and OpenFold's checkpoints, do not hold the model's sizes. The sizes come from a
preset, named by the user or by the file's name, with as many blocks in each stack as the arrays have; or the caller of
`load_parameters` gives them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evodsp.config import FeatureConfig, ModelConfig, from_dict, import_layers, leaves
from evodsp.errors import UserError
from evodsp.files import whole_file
from evodsp.model.adapters import ADAPTERS, merged
from evodsp.model.alphafold import AlphaFold
from evodsp.printing import quoted, shown
from evodsp.weights import deepmind, openfold
from evodsp.weights.by_name import NAMES, need_weights
from evodsp.weights.config import preset_of, published_features
from evodsp.weights.parameter_file import (
    FORMAT_VERSION,
    archive_damage,
    check_sum,
    container,
    is_pretrained,
    located,
    parameter_file,
    read_pretrained,
    upgrade,
)
from evodsp.weights.untrusted import (
    check_bytes,
    check_finite,
    check_weights,
    is_array,
    load_checked,
    load_untrusted,
    on_meta,
    refuse_foreign,
    unwrapped,
)


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
    is_ours = isinstance(content, Mapping) and "format_version" in content
    return not is_ours and openfold.is_openfold(content)


def _own(path: str | Path) -> Any:
    """What a file of evodsp holds, not checked yet; None of a folder, of other files, and of one that cannot be read."""
    content = None
    with suppress(Exception):  # a damaged pickle can raise any exception
        content = load_checked(Path(path)) if container(Path(path)) == "torch" else None
    return content if isinstance(content, Mapping) and "format_version" in content else None


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


PREFIX = "model."
_WEIGHTS = ("state_dict", "ema_state_dict")


def checkpoint_entries(config: ModelConfig, features: FeatureConfig | None) -> dict[str, Any]:
    """The entries, besides the weights, that `load_model` and `load_features` need in a Lightning checkpoint."""
    entries: dict[str, Any] = {"format_version": FORMAT_VERSION, "model_config": config.to_dict()}
    if features is not None:
        entries["features"] = dataclasses.asdict(features)
    return entries


def read_checkpoint(path: str | Path, content: Any = None) -> dict[str, Any]:
    """The checkpoint's dictionary, on the CPU, memory-mapped. `content`: what has been read of it already.

    Raises UserError if the file is not an evodsp checkpoint.
    """
    path = Path(path)
    checkpoint = content or (read_pretrained(path, PREFIX) if is_pretrained(path) else _read_file(path))
    known = checkpoint if isinstance(checkpoint, dict) else {}
    if lacking := [key for key in ("format_version", "model_config", "state_dict") if key not in known]:
        raise UserError(
            f"{path}: not an evodsp checkpoint, it lacks {', '.join(lacking)}; give one written by `evodsp fit`"
        )
    for key in _WEIGHTS:
        weights = checkpoint.get(key, {})
        if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
            raise UserError(
                f"{path}: its {key} is not a dictionary of arrays by name; give one written by `evodsp fit`"
            )
    upgrade(checkpoint)
    if checkpoint["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {shown(checkpoint['format_version'])}, but this evodsp reads {FORMAT_VERSION}; "
            "use the evodsp that wrote it"
        )
    return checkpoint


def _read_file(path: Path) -> Any:
    """Content of a file of `torch.save`. Raises UserError if it is none, or would harm its reader."""
    if path.is_dir():
        raise UserError(f"{path}: a folder, but an evodsp checkpoint is a file; give <output>/checkpoints/last.ckpt")
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint file; give one that `evodsp fit` wrote to <output>/checkpoints")
    kind = container(path)
    if kind is None:
        raise UserError(f"{path}: not a checkpoint (or cut short); give a .ckpt file written by `evodsp fit`")
    if kind == "npz":
        raise UserError(f"{path}: NumPy's .npz, not a checkpoint; give a .ckpt file written by `evodsp fit`")
    try:
        return load_checked(path)
    except Exception as error:  # a damaged pickle can raise any exception
        refuse_foreign(path)
        raise UserError(
            f"{path}: not a readable checkpoint, it is damaged or another program's; give one written by `evodsp fit`"
        ) from error


def load_model(
    path: str | Path,
    raw: bool = False,
    preset: str | None = None,
    layers: Collection[str] = (),
    add: Callable[[AlphaFold], object] = lambda model: None,
) -> AlphaFold:
    """Load a model from an evodsp checkpoint or from DeepMind's or OpenFold's parameters; on the CPU, in evaluation mode.

    path: evodsp's .ckpt, a folder of `evodsp.save_pretrained`, DeepMind's .npz, OpenFold's .pt or .ckpt, or a DeepSpeed folder
        written by OpenFold. Or a name: of AlphaFold2's parameters, such as model_1_ptm, that `evodsp weights fetch` has
        fetched, or of a model on the Hugging Face hub (hf:organisation/name, hf:organisation/name@revision).
    raw: take the raw weights. By default they are the exponential moving average, if training kept one.
    preset: the model that DeepMind's or OpenFold's parameters belong to; None: read from the file's name, such as
        params_model_1_ptm.npz. evodsp's checkpoints hold their sizes, so they take no preset.
    layers: the sub-layers of your own that the model has, as the checkpoint names them: 'NAME=PACKAGE.MODULE:CLASS'. Only what
        you name is imported.
    add: gives a new model the modules of one's own, whose weights an evodsp checkpoint or folder then holds
        (docs/own_input.md); called twice.

    Raises UserError if the file cannot be read, its weights do not fit the model, or a preset is given for evodsp's checkpoint.
    """
    if path in NAMES and not Path(path).exists():
        (path,) = need_weights([str(path)])
    path = located(path)
    content = _own(path)
    if content is None and is_parameter_file(path):
        model = load_published(path, preset, raw)[0]
        model.trained_features = load_features(path, preset)
        return model.eval()
    # read_checkpoint reads what it needs of the file, without checksums.
    if container(Path(path)) == "torch" and (problem := archive_damage(Path(path))) is not None:
        raise UserError(f"{path}: damaged ({problem}); copy it again, or use another checkpoint")
    checkpoint = _own_checkpoint(path, preset, content)
    config = import_layers(_config(path, checkpoint), layers, str(path))
    weights = own_weights(path, checkpoint, raw)
    add(shapes := on_meta(config, str(path)))
    check_weights(shapes, weights, str(path))
    if is_pretrained(path):
        check_sum(path)
    check_finite(weights, path)
    model = AlphaFold(config)
    add(model)
    model.trained_features = _features(path, checkpoint)
    load_weights(model, weights, str(path))
    return model.eval()


def own_weights(path: str | Path, checkpoint: Mapping[str, Any], raw: bool) -> dict[str, Tensor]:
    """The weights in a checkpoint's dictionary, by the model's names: their moving average, if it has one and `raw` is not set.
    Those with adapters are W + B A.

    Raises UserError if one is no array, if they claim to be larger than the file, or if an adapter does not fit its weight.
    """
    averaged = checkpoint.get("ema_state_dict")
    chosen = checkpoint["state_dict"] if raw or averaged is None else averaged
    if strange := [name for name, value in chosen.items() if not is_array(value)]:
        raise UserError(f"{path}: '{strange[0]}' is not an array of floats; give a checkpoint written by `evodsp fit`")
    check_bytes(chosen, parameter_file(path))
    weights = unwrapped(chosen, str(path))
    if not any(name.endswith(ADAPTERS) for name in weights):
        return weights
    try:
        return merged(weights)
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{path}: its adapters do not fit its weights: {quoted(error)}; is it damaged?") from error


def load_sizes(path: str | Path, preset: str | None = None) -> tuple[ModelConfig, FeatureConfig]:
    """The sizes of a model, and the feature sizes that it was validated with; without an entry, `FeatureConfig`'s defaults.

    For DeepMind's and OpenFold's parameters, the sizes that DeepMind predicts with; `preset` as in `load_model`. Raises
    UserError if the file cannot be read, or its sizes are of another version of evodsp.
    """
    content = _own(path)
    if content is None and is_parameter_file(path):
        name = preset or preset_of(Path(path))
        return ModelConfig.preset(name), published_features(name)
    checkpoint = _own_checkpoint(path, preset, content)
    return _config(path, checkpoint), _features(path, checkpoint)


def load_features(path: str | Path, preset: str | None = None) -> FeatureConfig:
    """The feature sizes of `load_sizes`."""
    return load_sizes(path, preset)[1]


def _features(path: str | Path, checkpoint: Mapping[str, Any]) -> FeatureConfig:
    values = checkpoint.get("features", {})
    if not isinstance(values, dict):
        raise UserError(f"{path}: unreadable feature sizes: 'features' is a {type(values).__name__}, not a dictionary")
    try:
        features: FeatureConfig = from_dict(FeatureConfig, values, "features")
    except Exception as error:  # of names and sizes of any type
        raise UserError(f"{path}: unreadable feature sizes: {quoted(error)}") from error
    return features


def load_weights(model: AlphaFold, weights: Mapping[str, Tensor], source: str) -> None:
    """Copy `weights` into `model`. Raises UserError that names the first one which is missing, unknown or of another shape."""
    check_weights(model, weights, source)
    model.load_state_dict(dict(weights))


def check_same_model(path: str | Path, checkpoint: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise UserError that names the first size in which a checkpoint's model and `config` differ."""
    saved, wanted = sizes_by_name(_config(path, checkpoint)), sizes_by_name(config)
    may_differ = ("dropout", "checkpoint")  # they matter in training only
    for key, value in wanted.items():
        if saved[key] != value and not key.endswith(may_differ):
            raise UserError(
                f"{path}: trained with model.{key} {saved[key]}, but the config says {value}; make them equal"
            )


def save_model(
    path: str | Path,
    model: AlphaFold,
    averaged: Mapping[str, Tensor] | None = None,
    features: FeatureConfig | None = None,
) -> None:
    """Write a checkpoint for prediction: weights and sizes, no optimizer state.

    `averaged`: the moving average, by the model's parameter names. `features`: the sizes that `load_features` returns.
    The file appears whole or not at all.
    """
    checkpoint = checkpoint_entries(model.config, features)
    checkpoint["state_dict"] = {f"{PREFIX}{name}": value.detach().cpu() for name, value in model.state_dict().items()}
    if averaged is not None:
        average = {f"{PREFIX}{name}": value.detach().cpu() for name, value in averaged.items()}
        checkpoint["ema_state_dict"] = {**checkpoint["state_dict"], **average}
    with whole_file(path) as partial:
        torch.save(checkpoint, partial)


def model_config(path: str | Path) -> ModelConfig:
    """The sizes of a checkpoint's model. Raises UserError if the file is not an evodsp checkpoint."""
    return _config(path, read_checkpoint(path))


def _own_checkpoint(path: str | Path, preset: str | None, content: Any) -> dict[str, Any]:
    if Path(path).is_file() and container(Path(path)) is None:
        if is_pretrained(Path(path).parent):
            raise UserError(f"{path}: the file of a folder that holds a model; give the folder: {Path(path).parent}")
        raise UserError(
            f"{path}: neither a checkpoint nor a parameter file (or cut short); give a .ckpt file written by `evodsp fit`, "
            "DeepMind's .npz or OpenFold's .pt"
        )
    checkpoint = read_checkpoint(path, content)
    if preset is not None:
        raise UserError(f"{path}: holds its model's sizes itself, so --preset {preset} cannot be given; leave it out")
    return checkpoint


def _config(path: str | Path, checkpoint: Mapping[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.from_dict(checkpoint["model_config"])
    except Exception as error:  # of sizes of any type
        raise UserError(f"{path}: unreadable model sizes: {quoted(error)}") from error


def sizes_by_name(config: ModelConfig) -> dict[str, Any]:
    """All sizes of a model by their dotted names, such as 'evoformer.blocks'."""
    return dict(leaves(config))
