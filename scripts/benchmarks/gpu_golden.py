"""Does the whole model compute on this GPU what DeepMind's AlphaFold2 computed on a CPU?

    python -m scripts.benchmarks.gpu_golden GOLDEN          # a folder of golden numbers; --cpu: on the CPU

GOLDEN holds params.npz, features_processed.npz, labels.npz, outputs.npz, losses.npz and grads.npz: model_1_ptm with
templates and two passes, whose stacks are short. For each backend, in float32 and in bf16-mixed, it prints a line
`result: BACKEND PRECISION ok` or `FAILED` with the differences: of representations and logits, as a share of the largest
number; of atoms in Å; of the loss; and of the first 256 numbers of each parameter's gradient, as a share of their norm. In
float32 the largest of each may be at most `LIMITS`. In bf16-mixed their root mean squares may be `OF_FORMULA` times those of
the formulas in the same precision. The exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evodsp.config import KernelsConfig, LossConfig, ModelConfig
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.heads import ModelOutput
from evodsp.model.kernels.operators import choose
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import use_kernels
from evodsp.weights.deepmind import export_deepmind, read_npz, set_parameters

from .gpu_cases import autocast

REAL = 64
"""Residues that are no padding."""
WEIGHTS = LossConfig(plddt=0.01, pae=0.1, experimentally_resolved=0.01, violation=1.0, scale_by_length=False)
LIMITS = {"outputs": 1e-4, "atoms": 1e-2, "loss": 1e-4, "gradients": 1e-2}
"""Of float32: some times what a CPU is allowed, because a GPU sums in another order. The target of pLDDT is a bin, and the lDDT
of some residues lies on the edge of two: on a CPU that alone makes 3e-3 of the head's gradients."""
OF_FORMULA = 1.5
FLOOR = 1e-3
"""Gradients smaller than this share of the largest count as of this size: some are zero but for rounding."""


def config() -> ModelConfig:
    """The configuration of the golden numbers."""
    preset = ModelConfig.preset("model_1_ptm")
    return dataclasses.replace(
        preset,
        evoformer=dataclasses.replace(preset.evoformer, blocks=2),
        extra_msa=dataclasses.replace(preset.extra_msa, blocks=1),
        templates=dataclasses.replace(preset.templates, blocks=1),
        structure_module=dataclasses.replace(preset.structure_module, iterations=2),
    )


def differences(
    model: AlphaFold, batch: dict[str, Tensor], expected: dict[str, dict[str, np.ndarray]], dtype: torch.dtype
) -> dict[str, float]:
    """How far a pass with all losses, and its gradients, are from the golden numbers."""
    casts = CastParameters(model)
    model.zero_grad()
    with autocast(batch["aatype"].device, dtype):
        casts.make()
        output = model(batch)
        loss, _ = total_loss(output, batch, WEIGHTS, model.config.heads)
    loss.backward()
    casts.drop()
    outputs = expected["outputs"]
    size = np.abs if dtype == torch.float32 else np.square

    def distance(*errors: np.ndarray) -> float:
        """The largest error in float32, otherwise the root of the mean square."""
        found = size(np.concatenate([x.ravel() for x in errors]))
        return float(found.max() if dtype == torch.float32 else np.sqrt(found.mean()))

    whole = [_relative(ours, outputs[name]) for name, ours in named(output).items()]
    atoms = output.structure.positions[0, :REAL].detach().float().cpu().numpy()
    error = atoms - outputs["structure_module/final_atom_positions"][:REAL]
    total = float(expected["losses"]["total_loss"])
    found = gradients(model)
    heads = {key.removeprefix("head:"): x for key, x in expected["grads"].items() if key.startswith("head:")}
    largest = max(float(np.linalg.norm(x)) for x in heads.values())
    of_gradients = [
        np.linalg.norm(found[key].ravel()[: len(x)] - x) / max(float(np.linalg.norm(x)), FLOOR * largest)
        for key, x in heads.items()
    ]
    return {
        "outputs": distance(*whole),
        "atoms": distance(error[output.structure.mask[0, :REAL].cpu().numpy() > 0]),
        "loss": abs(loss.item() / total - 1),
        "gradients": distance(np.array(of_gradients)),
    }


def named(output: ModelOutput) -> dict[str, Tensor]:
    """What is compared, without padding, by the name of the golden array."""
    pairs = {
        "representations/pair": output.representations["pair"],
        "distogram/logits": output.logits["distogram"],
        "predicted_aligned_error/logits": output.logits["predicted_aligned_error"],
    }
    rows = {"representations/msa": output.representations["msa"], "masked_msa/logits": output.logits["masked_msa"]}
    singles = {
        "representations/single": output.representations["single"],
        "representations/structure_module": output.structure.single,
        "predicted_lddt/logits": output.logits["plddt"],
        "experimentally_resolved/logits": output.logits["experimentally_resolved"],
    }
    return {
        **{name: x[0, :REAL, :REAL] for name, x in pairs.items()},
        **{name: x[0, :, :REAL] for name, x in rows.items()},
        **{name: x[0, :REAL] for name, x in singles.items()},
    }


def _relative(ours: Tensor, golden: np.ndarray) -> np.ndarray:
    theirs = golden[tuple(slice(size) for size in ours.shape)]
    difference: np.ndarray = (ours.detach().float().cpu().numpy() - theirs) / np.abs(theirs).max()
    return difference


def gradients(model: AlphaFold) -> dict[str, np.ndarray]:
    """The gradients of all parameters, under DeepMind's names."""
    holder = copy.deepcopy(model)
    with torch.no_grad():
        for to, parameter in zip(holder.parameters(), model.parameters(), strict=True):
            to.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return export_deepmind(holder)


def verdict(found: dict[str, float], dtype: torch.dtype, formula: dict[str, float] | None) -> str:
    """What stands behind "result: BACKEND PRECISION"."""
    bound = LIMITS
    if dtype != torch.float32:
        bound = {name: OF_FORMULA * x for name, x in formula.items()} if formula else dict.fromkeys(found, np.inf)
    bad = [name for name, x in found.items() if not x <= bound[name]]
    numbers = ", ".join(f"{name} {x:.1e}{' Å' * (name == 'atoms')}" for name, x in found.items())
    return f"{'FAILED' if bad else 'ok'} {numbers}" + "".join(f"; {name}: allowed {bound[name]:.1e}" for name in bad)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("golden", type=Path)
    parser.add_argument("--cpu", action="store_true", help="on the CPU")
    options = parser.parse_args(words)
    device = torch.device("cpu" if options.cpu else "cuda")
    expected = {name: read_npz(options.golden / f"{name}.npz") for name in ("outputs", "losses", "grads")}
    batch = {"use_clamped_fape": torch.ones(1)}
    for name in ("features_processed", "labels"):
        with np.load(options.golden / f"{name}.npz") as file:
            batch |= {key: torch.from_numpy(file[key])[None] for key in file.files}
    batch = {name: x.to(device) for name, x in batch.items()}
    model = AlphaFold(config())
    set_parameters(model, read_npz(options.golden / "params.npz"))
    model.to(device)
    failed = False
    formulas: dict[torch.dtype, dict[str, float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for backend in ("reference", "chunked" if options.cpu else "triton"):
            use_kernels(model, choose(KernelsConfig(backend=backend), device, dtype)[0])
            found = differences(model, batch, expected, dtype)
            text = verdict(found, dtype, formulas.get(dtype))
            formulas.setdefault(dtype, found)
            precision = "fp32" if dtype == torch.float32 else "bf16-mixed"
            print(f"result: {backend} {precision} {text}", flush=True)
            failed |= text.startswith("FAILED")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
