"""OpenFold's side of the comparison: its model on the arrays of one .npz file, its outputs to another.

    <python with openfold> scripts/parity/openfold_side.py SUBJECT.npz RESULT.npz

UNVERIFIED: written from OpenFold's public source (releases 1.0 to 2.x), never run, because its PyPI release does not build.
Where `import openfold` fails it ends with code 3, and the comparison is skipped with a line that says so. It reads beside the
subject: `openfold.pt` and `openfold_legacy.pt`, the checkpoints that evodsp exported in OpenFold's two namings, of which the
one that this OpenFold has is loaded strictly; and `deepmind.npz`, which its own `import_jax_weights_` reads: both must agree.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

SKIPPED = 3
"""Exit code where the package is not installed."""
HEADS = {
    "distogram_logits": "distogram/logits",
    "masked_msa_logits": "masked_msa/logits",
    "lddt_logits": "predicted_lddt/logits",
    "experimentally_resolved_logits": "experimentally_resolved/logits",
    "tm_logits": "predicted_aligned_error/logits",
}
REPRESENTATIONS = ("msa", "pair", "single")


def build(settings: dict[str, Any]) -> torch.nn.Module:
    """OpenFold's model of the preset, with the depths of `settings`; nothing in slices, no dropout."""
    from openfold.config import model_config  # type: ignore[import-not-found]
    from openfold.model.model import AlphaFold  # type: ignore[import-not-found]

    config = model_config(settings["model"])
    config.globals.chunk_size = None
    config.model.evoformer_stack.no_blocks = settings["evoformer"]
    config.model.extra_msa.extra_msa_stack.no_blocks = settings["extra_msa"]
    config.model.template.template_pair_stack.no_blocks = settings["template"]
    config.model.structure_module.no_blocks = settings["structure"]
    model: torch.nn.Module = AlphaFold(config).eval()
    return model


def load(model: torch.nn.Module, folder: Path) -> None:
    """Set all parameters from the checkpoint that evodsp exported in this OpenFold's naming; strict."""
    own = set(model.state_dict())
    checkpoints = [torch.load(folder / name, map_location="cpu") for name in ("openfold.pt", "openfold_legacy.pt")]
    closest = min(checkpoints, key=lambda arrays: len(own ^ set(arrays)))
    model.load_state_dict(closest)


def imported_difference(settings: dict[str, Any], model: torch.nn.Module, folder: Path) -> float:
    """The largest difference between `model` and what OpenFold itself makes of DeepMind's arrays."""
    from openfold.utils.import_weights import import_jax_weights_  # type: ignore[import-not-found]

    other = build(settings)
    import_jax_weights_(other, str(folder / "deepmind.npz"), version=settings["model"])
    theirs = other.state_dict()
    return max(float((value - theirs[name]).abs().max()) for name, value in model.state_dict().items())


def batch_of(features: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """OpenFold's input: its names, integers of 64 bits, the axis of recycling iterations last."""
    from openfold.data import data_transforms  # type: ignore[import-not-found]

    tensors = {name: torch.from_numpy(values) for name, values in features.items()}
    tensors = {name: value if value.is_floating_point() else value.long() for name, value in tensors.items()}
    tensors["template_all_atom_mask"] = tensors.pop("template_all_atom_masks")
    exists = tensors["atom37_atom_exists"]  # zero in padding; the transform knows residue types only
    tensors = data_transforms.make_atom14_masks(tensors)
    tensors["atom37_atom_exists"] = exists
    tensors = data_transforms.atom37_to_torsion_angles(prefix="template_")(tensors)
    return {name: value.movedim(0, -1) for name, value in tensors.items()}


def run(subject: dict[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    settings = json.loads(str(subject["settings"]))
    model = build(settings)
    load(model, folder)
    features = {name.split(":", 1)[1]: value for name, value in subject.items() if name.startswith("features:")}
    # Gradients stay on: without them OpenFold works in place, with a kernel that exists for GPUs only.
    outputs = model(batch_of(features))
    results = {theirs: outputs[ours] for ours, theirs in HEADS.items() if ours in outputs}
    results |= {f"representations/{name}": outputs[name] for name in REPRESENTATIONS}
    results["representations/structure_module"] = outputs["sm"]["single"]
    results["structure/positions"] = outputs["final_atom_positions"]
    arrays = {name: value.detach().numpy() for name, value in results.items()}
    arrays["import_difference"] = np.array(imported_difference(settings, model, folder))
    return arrays


def main(arguments: list[str]) -> int:
    try:
        import openfold  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        return SKIPPED
    subject, result = map(Path, arguments)
    with np.load(subject) as file:
        outputs = run({key: file[key] for key in file.files}, subject.parent)
    np.savez(result, **outputs)  # type: ignore[arg-type]  # no array is named 'allow_pickle'
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
