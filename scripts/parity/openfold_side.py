"""OpenFold's side of the comparison: its model on the arrays of one .npz file, its outputs, losses and gradients to another.

    OPENFOLD_SOURCE=<clone of openfold> <python with its requirements> scripts/parity/openfold_side.py SUBJECT.npz RESULT.npz

OpenFold is taken from the folder OPENFOLD_SOURCE, or without it from the Python environment. If there is neither, the exit code
is 3 and the comparison is skipped, as it is for a model that this OpenFold lacks. Verified on a CPU with the source in
OpenFold's PyPI release 0.0.1 (2022), which pip cannot build, but which can be imported from its folder, and with its repository
(git ce0029e, 2025). Beside the subject lie `openfold.pt` and, for a monomer, `openfold_legacy.pt`, which evodsp exported in
OpenFold's two namings and of which the one that fits this OpenFold is loaded strictly; and `deepmind.npz`, which OpenFold's own
`import_jax_weights_` reads: both must give the same parameters. Of a multimer nothing else is compared.

OpenFold is used as it is, except that

- its CUDA extension for the softmax of attention, which it needs even on a CPU, is replaced by torch's softmax;
- it does not see DeepSpeed, of which it expects a version of 2022;
- the CA-C-N angle violation takes the angle's standard deviation instead of the C-N bond length's. OpenFold kept the line of
  AlphaFold's releases up to 2.3; DeepMind's source (git c77e5d2) corrected it, and evodsp follows the corrected source;
- two values that exact arithmetic puts on the edge of a bin are put into the right bin, where rounding decides otherwise: an
  lDDT of k / 50, and the aligned error of a residue with itself, which is 0.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

SKIPPED = 3
"""Exit code if OpenFold is not installed, or lacks the model."""
SOURCE = "OPENFOLD_SOURCE"
"""Environment variable: folder of a clone of OpenFold."""
HEADS = {
    "distogram_logits": "distogram/logits",
    "masked_msa_logits": "masked_msa/logits",
    "lddt_logits": "predicted_lddt/logits",
    "experimentally_resolved_logits": "experimentally_resolved/logits",
    "tm_logits": "predicted_aligned_error/logits",
}
REPRESENTATIONS = ("msa", "pair", "single")

Batch = dict[str, torch.Tensor]


def replace_kernel() -> None:
    """Stand in for the compiled extension that OpenFold imports: the softmax of attention, in place, and its gradient."""

    def forward(logits: torch.Tensor, rows: int, columns: int) -> None:
        logits.copy_(logits.softmax(-1))

    def backward(weights: torch.Tensor, grad: torch.Tensor, values: torch.Tensor, *sizes: int) -> None:
        """Replace the weights [*, Q, K] by the gradient of the logits, from the output's gradient and the values."""
        grad_weights = grad @ values.mT
        weights.mul_(grad_weights - (weights * grad_weights).sum(-1, keepdim=True))

    kernel = types.ModuleType("attn_core_inplace_cuda")
    kernel.forward_, kernel.backward_ = forward, backward  # type: ignore[attr-defined]
    sys.modules["attn_core_inplace_cuda"] = kernel


def hide_deepspeed() -> None:
    """Let OpenFold find no DeepSpeed: where there is one, OpenFold asks it for a function that newer versions do not have."""
    sys.modules["deepspeed"] = None  # type: ignore[assignment]


def correct_angle_deviation(loss: Any, constants: Any) -> None:
    """Make the CA-C-N angle violation use the angle's own standard deviation."""
    released = loss.between_residue_bond_loss

    def corrected(*args: Any, **kwargs: Any) -> dict[str, Any]:
        result: dict[str, Any] = released(*args, **kwargs)
        of_bond = constants.between_res_bond_length_stddev_c_n
        constants.between_res_bond_length_stddev_c_n = [constants.between_res_cos_angles_ca_c_n[1]] * 2
        try:
            result["ca_c_n_loss_mean"] = released(*args, **kwargs)["ca_c_n_loss_mean"]
        finally:
            constants.between_res_bond_length_stddev_c_n = of_bond
        return result

    loss.between_residue_bond_loss = corrected


def settle_bin_edges(loss: Any) -> None:
    """Put values on the edge of a bin where exact arithmetic puts them."""
    released_lddt, released_tm, entropy = loss.lddt, loss.tm_loss, loss.softmax_cross_entropy

    def with_zero_diagonal(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        labels, diagonal = labels.clone(), torch.arange(len(labels))
        labels[diagonal, diagonal] = 0
        labels[diagonal, diagonal, 0] = 1
        return entropy(logits, labels)

    def tm_loss(*args: Any, **kwargs: Any) -> Any:
        loss.softmax_cross_entropy = with_zero_diagonal
        try:
            return released_tm(*args, **kwargs)
        finally:
            loss.softmax_cross_entropy = entropy

    # Other values of an lDDT are at least 1 / (100 residues) away from an edge.
    loss.lddt = lambda *args, **kwargs: released_lddt(*args, **kwargs) + 1e-6
    loss.tm_loss = tm_loss


def build(settings: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    """OpenFold's model of the preset, with the depths of `settings`, no chunks and no dropout; and its configuration."""
    from openfold.config import model_config  # type: ignore[import-not-found]
    from openfold.model.model import AlphaFold  # type: ignore[import-not-found]

    try:
        config = model_config(settings["model"])
    except ValueError:  # OpenFold has no multimers before version 2
        sys.exit(SKIPPED)
    config.globals.chunk_size = None
    config.model.evoformer_stack.no_blocks = settings["evoformer"]
    config.model.extra_msa.extra_msa_stack.no_blocks = settings["extra_msa"]
    config.model.template.template_pair_stack.no_blocks = settings["template"]
    config.model.structure_module.no_blocks = settings["structure"]
    model: torch.nn.Module = AlphaFold(config).eval()
    return model, config


def load(model: torch.nn.Module, folder: Path) -> None:
    """Set all parameters from the checkpoint that evodsp exported in this OpenFold's naming; strict."""
    expected = set(model.state_dict())
    files = [folder / name for name in ("openfold.pt", "openfold_legacy.pt")]
    checkpoints = [torch.load(file, map_location="cpu", weights_only=True) for file in files if file.is_file()]
    closest = min(checkpoints, key=lambda arrays: len(expected ^ set(arrays)))
    model.load_state_dict(closest)


def imported_difference(settings: dict[str, Any], model: torch.nn.Module, folder: Path) -> float:
    """The largest difference between `model` and the parameters that OpenFold itself makes of DeepMind's arrays."""
    from openfold.utils.import_weights import import_jax_weights_  # type: ignore[import-not-found]

    other, _ = build(settings)
    import_jax_weights_(other, str(folder / "deepmind.npz"), version=settings["model"])
    theirs = other.state_dict()
    return max(float((value - theirs[name]).abs().max()) for name, value in model.state_dict().items())


def tensors(arrays: dict[str, np.ndarray]) -> Batch:
    """Floats as they are, integers with 64 bits."""
    values = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: value if value.is_floating_point() else value.long() for name, value in values.items()}


def batch_of(features: dict[str, np.ndarray]) -> Batch:
    """The model's input: OpenFold's names, the axis of recycling iterations last."""
    from openfold.data import data_transforms  # type: ignore[import-not-found]

    batch = tensors(features)
    batch["template_all_atom_mask"] = batch.pop("template_all_atom_masks")
    exists = {name: batch[name] for name in ("atom14_atom_exists", "atom37_atom_exists")}
    batch = data_transforms.make_atom14_masks(batch) | exists  # the transform does not know padding
    batch = data_transforms.atom37_to_torsion_angles(prefix="template_")(batch)
    return {name: value.movedim(0, -1) for name, value in batch.items()}


def labels_of(features: Batch, structure: dict[str, np.ndarray]) -> Batch:
    """The losses' input: the last pass's features, and labels that OpenFold derives from the atoms of a structure."""
    from openfold.data import data_transforms

    batch = {name: value[..., -1] for name, value in features.items()} | tensors(structure)
    exists = {name: batch[name] for name in ("atom14_atom_exists", "atom37_atom_exists")}
    for transform in (
        data_transforms.make_atom14_positions,
        data_transforms.atom37_to_frames,
        data_transforms.get_backbone_frames,
        data_transforms.make_pseudo_beta(prefix=""),
        data_transforms.atom37_to_torsion_angles(prefix=""),
        data_transforms.get_chi_angles,
    ):
        batch = transform(batch)
    # The total is multiplied with the root of seq_length.
    return batch | exists | {"use_clamped_fape": torch.tensor(1.0), "seq_length": torch.tensor(1)}


def losses_of(config: Any, output: dict[str, Any], batch: Batch) -> tuple[torch.Tensor, Batch]:
    """The total loss with the weights of fine-tuning, and its terms without weights, under evodsp's names."""
    from openfold.np import residue_constants  # type: ignore[import-not-found]
    from openfold.utils import loss  # type: ignore[import-not-found]

    correct_angle_deviation(loss, residue_constants)
    settle_bin_edges(loss)
    weights = config.loss
    weights.violation.weight, weights.experimentally_resolved.weight = 1.0, 0.01
    total, found = loss.AlphaFoldLoss(weights)(output, batch, _return_breakdown=True)
    structure = output["sm"]

    def torsions(chi: float, norm: float) -> torch.Tensor:
        settings = {**batch, **weights.supervised_chi, "chi_weight": chi, "angle_norm_weight": norm}
        term: torch.Tensor = loss.supervised_chi_loss(structure["angles"], structure["unnormalized_angles"], **settings)
        return term

    terms = {
        "total": total,
        "backbone_fape": loss.backbone_loss(traj=structure["frames"], **{**batch, **weights.fape.backbone}),
        "sidechain_fape": loss.sidechain_loss(
            structure["sidechain_frames"], structure["positions"], **{**batch, **weights.fape.sidechain}
        ),
        "torsion": torsions(1.0, 0.0),
        "angle_norm": torsions(0.0, 1.0),
        "plddt": found["plddt_loss"],
        **{name: found[name] for name in ("violation", "distogram", "masked_msa", "experimentally_resolved")},
    }
    if "tm" in found:
        terms["pae"] = found["tm"]
    return total, terms


def run(subject: dict[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """Outputs of the last pass, its losses, and the gradient of the total loss under OpenFold's parameter names."""
    settings = json.loads(str(subject["settings"]))
    model, config = build(settings)
    load(model, folder)
    difference = imported_difference(settings, model, folder)
    if settings["weights_only"]:
        return {"import_difference": np.array(difference)}
    features = batch_of(part(subject, "features"))
    output = model(dict(features))
    total, terms = losses_of(config, output, labels_of(features, part(subject, "structure")))
    total.backward()
    results = {theirs: output[ours] for ours, theirs in HEADS.items() if ours in output}
    results |= {f"representations/{name}": output[name] for name in REPRESENTATIONS}
    results["representations/structure_module"] = output["sm"]["single"]
    results["structure/positions"] = output["final_atom_positions"]
    results["structure/affines"] = output["sm"]["frames"]
    results |= {f"loss/{name}": value for name, value in terms.items()}
    for name, parameter in model.named_parameters():
        results[f"gradient/{name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    arrays = {name: value.detach().numpy() for name, value in results.items()}
    return arrays | {"import_difference": np.array(difference)}


def part(subject: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{name}:"): value for key, value in subject.items() if key.startswith(f"{name}:")}


def main() -> int:
    if source := os.environ.get(SOURCE):
        properties = Path(source, "openfold", "resources", "stereo_chemical_props.txt")
        if not properties.is_file():
            print(f"{properties}: missing; OpenFold's installation downloads it, AlphaFold has a copy", file=sys.stderr)
            return 1
        sys.path.insert(0, source)
    replace_kernel()
    hide_deepspeed()
    try:
        import openfold  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if source or error.name != "openfold":
            print(f"OpenFold cannot be imported from {source or 'this environment'}: {error}", file=sys.stderr)
            return 1
        return SKIPPED
    from peer_calls import serve  # type: ignore[import-not-found]

    serve(__file__, "openfold", lambda arrays: run(arrays, Path(sys.argv[1]).parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
