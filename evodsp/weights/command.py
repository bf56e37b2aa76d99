"""`evodsp weights import` and `export`: parameter files to checkpoints and back."""

from __future__ import annotations

from evodsp.config import ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import load_model, save_model
from evodsp.weights.config import ExportConfig, ImportConfig, check_output, preset_of, published_features
from evodsp.weights.deepmind import export_deepmind, read_npz, set_parameters, with_blocks_of, write_npz


def import_weights(settings: ImportConfig) -> str:
    """Write a checkpoint from DeepMind's parameter file; returns a line that says what was done.

    Raises UserError if the output exists, or the file is not exactly that of the model.
    """
    check_output(settings.output, settings.overwrite)
    preset = settings.preset or preset_of(settings.input)
    config = ModelConfig.preset(preset)
    arrays = read_npz(settings.input)
    model = AlphaFold(with_blocks_of(config, arrays))
    set_parameters(model, arrays, str(settings.input))
    save_model(settings.output, model, features=published_features(preset))
    return f"{settings.output}: {preset}, {_count(model):,} parameters from {len(arrays)} arrays"


def export_weights(settings: ExportConfig) -> str:
    """Write DeepMind's parameter file from a checkpoint; returns a line that says what was done.

    Raises UserError if the output exists, or the checkpoint is none.
    """
    check_output(settings.output, settings.overwrite)
    model = load_model(settings.checkpoint, settings.raw)
    arrays = export_deepmind(model, settings.fused)
    write_npz(settings.output, arrays)
    return f"{settings.output}: {_count(model):,} parameters in {len(arrays)} arrays"


def _count(model: AlphaFold) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
