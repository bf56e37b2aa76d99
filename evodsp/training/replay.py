"""A sample that was not finite, as a file with the weights of its step, and `evodsp replay`, which computes it again alone.

The file is a checkpoint (`evodsp.weights.checkpoint`) with one more entry, `replay`: the batch, the seed, the settings of
losses and operators, and the findings of the run. The replay draws the same dropout masks, on one device, with autograd's
anomaly detection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evodsp.config import KernelsConfig, LossConfig, ModelConfig, from_dict
from evodsp.errors import UserError
from evodsp.files import whole_file
from evodsp.losses.permutation import ENTITIES, with_fitting_labels
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.heads import ModelOutput
from evodsp.model.kernels.registry import choose
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import use_kernels
from evodsp.printing import show
from evodsp.rng import Draws
from evodsp.weights.checkpoint import checkpoint_entries, load_weights, own_weights, read_checkpoint
from evodsp.weights.untrusted import check_weights, on_meta

if TYPE_CHECKING:
    from evodsp.training.module import TrainingModule

_SHOWN = 20
"""The number of parameters to list."""


def write_replay(
    path: Path, module: TrainingModule, weights: Mapping[str, Tensor], batch: Mapping[str, Tensor], found: str
) -> None:
    """Write the file of one sample. `weights`: whole tensors, under the module's names. `batch`: this sample alone, on the CPU.
    `found`: the run's line about the sample."""
    entry = {
        "batch": dict(batch),
        "seed": module.seed,
        "loss": dataclasses.asdict(module.config.loss),
        "kernels": dataclasses.asdict(module.kernels),
        "half": "bf16" in str(module.trainer.precision),
        "step": module.trainer.global_step,
        "found": found,
    }
    checkpoint = checkpoint_entries(module.model.config, module.features)
    with whole_file(path) as partial:
        torch.save({**checkpoint, "state_dict": dict(weights), "replay": entry}, partial)


class FirstNotFinite:
    """Names the first module, in the order of computation and the innermost one, whose output is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.name: str | None = None
        for name, module in model.named_modules():
            module.register_forward_hook(lambda _module, _inputs, output, name=name: self._look(name, output))

    def _look(self, name: str, output: Any) -> None:
        if self.name is None and any(not x.isfinite().all() for x in _floats(output)):
            self.name = name


def _floats(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach()] if value.is_floating_point() else []
    if isinstance(value, tuple | list):
        return [x for item in value for x in _floats(item)]
    if isinstance(value, Mapping):
        return _floats(list(value.values()))
    if dataclasses.is_dataclass(value):
        return _floats([getattr(value, item.name) for item in dataclasses.fields(value)])
    return []


def replay(path: str | Path, device: torch.device) -> tuple[list[str], bool]:
    """Compute the sample of a replay file again. Returns lines of findings, and whether all numbers are finite.

    Raises UserError if the file is none that a run wrote for `evodsp replay`.
    """
    checkpoint = read_checkpoint(path)
    entry = checkpoint.get("replay")
    if not isinstance(entry, dict):
        raise UserError(f"{path}: a checkpoint, but not of a sample; give a file of <output>/replays")
    weights, config = own_weights(path, checkpoint, raw=True), ModelConfig.from_dict(checkpoint["model_config"])
    check_weights(on_meta(config, str(path)), weights, str(path))
    model = AlphaFold(config).to(next(iter(weights.values())).dtype)
    load_weights(model, weights, str(path))
    model.to(device).train()
    half, loss_config = entry["half"], from_dict(LossConfig, entry["loss"], "loss")
    dtype = torch.bfloat16 if half else next(model.parameters()).dtype
    kernels, _ = choose(from_dict(KernelsConfig, entry["kernels"], "kernels"), device, dtype)
    use_kernels(model, kernels)
    of_host = ("sample_index", ENTITIES)
    batch = {name: value if name in of_host else value.to(device) for name, value in entry["batch"].items()}
    dropout = Draws.root(entry["seed"]).at("dropout")
    draws = [dropout.at(index) for index in batch["sample_index"].tolist()]
    first, casts = FirstNotFinite(model), CastParameters(model)
    lines = [f"step {entry['step']}, {entry['found']}"]
    wrong_inputs = [name for name, value in batch.items() if value.is_floating_point() and not value.isfinite().all()]
    if wrong_inputs:
        lines.append(f"not finite in the sample itself: {', '.join(wrong_inputs)}")
    with (
        torch.autograd.detect_anomaly(check_nan=True),
        torch.autocast(device.type, torch.bfloat16, enabled=half),
        casts,
    ):
        output: ModelOutput = model(batch, draws)
        if first.name is not None:
            lines.append(f"first module whose output is not finite: {first.name}")
        batch = with_fitting_labels(output.structure.positions, batch, draws, model.exchange)
        loss, terms = total_loss(output, batch, loss_config, model.config.heads, model.exchange)
        lines += [f"{name:<24} {float(value):.6g}" for name, value in terms.items()]
        finite = bool(loss.isfinite()) and first.name is None and not wrong_inputs
        try:
            loss.backward()
        except RuntimeError as error:
            if "nan values" not in str(error):
                raise
            return [*lines, f"backward: {error}"], False
    gradients = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if gradients:
        more = [f"and {len(gradients) - _SHOWN} more"] if len(gradients) > _SHOWN else []
        lines.append(f"gradients that are not finite: {', '.join([*gradients[:_SHOWN], *more])}")
    finite = finite and not gradients
    return [*lines, "all numbers are finite: this device does not repeat it"] if finite else lines, finite


def run(path: str, device: str) -> int:
    """`evodsp replay`: print the findings, and return the exit code: 1 if something is not finite."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    lines, finite = replay(path, torch.device(device))
    show("\n".join(lines))
    return 0 if finite else 1
