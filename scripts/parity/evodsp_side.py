"""evodsp's side of the comparison: its outputs, losses and gradients on the same subject, under DeepMind's names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from evodsp.config import LossConfig, ModelConfig
from evodsp.geometry.frames import Rigid, structure_labels
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.evoformer import EvoformerBlock
from evodsp.model.heads import ModelOutput
from evodsp.weights.deepmind import set_parameters, their_arrays
from evodsp.weights.names import is_fused, parameter_names

# DeepMind's loss weights of the fine-tuned models. The confidence terms are computed apart: see `losses`.
STRUCTURE = LossConfig(plddt=0.0, violation=1.0, experimentally_resolved=0.01, scale_by_length=False)
CONFIDENCE = LossConfig(
    **dict.fromkeys(
        ("backbone_fape", "sidechain_fape", "torsion", "angle_norm", "distogram", "masked_msa"), 0.0
    ),
    plddt=0.01,
    scale_by_length=False,
)  # fmt: skip


def run(
    config: ModelConfig,
    parameters: dict[str, np.ndarray],
    features: dict[str, np.ndarray],
    structure: dict[str, np.ndarray],
    reference: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Outputs of the last pass, its losses, and the gradient of the total loss in DeepMind's layout.

    `features`: axes [cycle, …]. `structure`: atoms of the label. `reference`: the other side's outputs, whose structure the
    confidence losses judge.
    """
    model = AlphaFold(config)
    set_parameters(model, parameters)
    batch = {name: torch.from_numpy(values)[None] for name, values in features.items()}
    batch |= labels_of(features["aatype"][-1], structure)
    output = model(batch)
    total, terms = losses(output, batch, config, reference)
    total.backward()
    results = {**outputs_of(output), **{f"loss/{name}": value.numpy() for name, value in terms.items()}}
    return results | {f"gradient/{key}": value for key, value in gradients(model, is_fused(parameters)).items()}


def run_chains(
    config: ModelConfig,
    parameters: dict[str, np.ndarray],
    features: dict[str, np.ndarray],
    reference: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Outputs of the last pass of a multimer model, and the gradient of their weighted sum in DeepMind's layout.

    `reference`: the other side's results, which hold the weights.
    """
    model = AlphaFold(config)
    set_parameters(model, parameters)
    output = model({name: torch.from_numpy(values)[None] for name, values in features.items()})
    found = tensors_of(output)
    weighted = [(torch.from_numpy(reference[f"weight/{name}"]) * value).sum() for name, value in found.items()]
    torch.stack(weighted).sum().backward()
    results = {name: value.detach().numpy() for name, value in found.items()}
    return results | {f"gradient/{key}": value for key, value in gradients(model, is_fused(parameters)).items()}


def labels_of(aatype: np.ndarray, structure: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The labels of the losses, from the atoms of a structure; axes [batch, R, …]."""
    positions, mask = (torch.from_numpy(structure[f"all_atom_{name}"]) for name in ("positions", "mask"))
    labels = structure_labels(torch.from_numpy(aatype), positions, mask)
    labels |= {"resolution": torch.tensor(float(structure["resolution"])), "use_clamped_fape": torch.tensor(1.0)}
    # The feature atom14_atom_exists is zero in padding; the label of the same name is not.
    return {name: label[None] for name, label in labels.items() if name != "atom14_atom_exists"}


def losses(
    output: ModelOutput, batch: dict[str, Tensor], config: ModelConfig, reference: dict[str, np.ndarray]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The total loss and its terms.

    pLDDT and PAE losses sort the errors of the predicted structure into bins. They get the other side's structure, so that
    rounding cannot put an error into different bins on the two sides. No gradient flows through it.
    """
    affines = torch.from_numpy(reference["structure/affines"])[:, None]
    judged = replace(
        output.structure,
        positions=torch.from_numpy(reference["structure/positions"])[None],
        backbone=Rigid.from_quaternion(affines[..., :4], affines[..., 4:]),
    )
    confidence = replace(CONFIDENCE, pae=0.1 if "predicted_aligned_error" in output.logits else 0.0)
    total, terms = total_loss(output, batch, STRUCTURE, config.heads)
    more, more_terms = total_loss(replace(output, structure=judged), batch, confidence, config.heads)
    total = total + more
    return total, {**terms, **more_terms, "total": total.detach()}


def outputs_of(output: ModelOutput) -> dict[str, np.ndarray]:
    """Representations, logits and positions (Å) of a batch of one, without the batch axis."""
    return {name: value.detach().numpy() for name, value in tensors_of(output).items()}


def tensors_of(output: ModelOutput) -> dict[str, Tensor]:
    """The same, with their gradients."""
    found = {
        "representations/msa": output.representations["msa"],
        "representations/msa_first_row": output.representations["msa"][:, 0],
        "representations/pair": output.representations["pair"],
        "representations/single": output.representations["single"],
        "representations/structure_module": output.structure.single,
        "distogram/logits": output.logits["distogram"],
        "masked_msa/logits": output.logits["masked_msa"],
        "predicted_lddt/logits": output.logits["plddt"],
        "experimentally_resolved/logits": output.logits.get("experimentally_resolved"),
        "predicted_aligned_error/logits": output.logits.get("predicted_aligned_error"),
        "structure/positions": output.structure.positions,
    }
    return {name: value[0] for name, value in found.items() if value is not None}


def gradients(model: AlphaFold, fused: bool) -> dict[str, np.ndarray]:
    """The gradient of every parameter as DeepMind's arrays, blocks stacked. It is 0 for parameters that are not used."""
    parameters = dict(model.named_parameters())
    unused = {
        f"{path}.msa_stack.{name}"
        for path, block in model.named_modules()
        if isinstance(block, EvoformerBlock)
        for layer in {step.layer for step in block.msa_stack.steps} - {step.layer for step in block.steps}
        for parameter in layer.parameters()
        for name, other in block.msa_stack.named_parameters()
        if other is parameter
    }
    blocks: dict[str, list[np.ndarray]] = {}
    stacked = set()
    for name in parameter_names(model.config, fused):
        gradient = parameters[name.ours].grad
        if name.ours in unused and gradient is None:
            gradient = torch.zeros_like(parameters[name.ours])
        if gradient is None:
            raise RuntimeError(f"no gradient of {name.ours}")
        for key, array in zip(name.keys, their_arrays(name, gradient), strict=True):
            blocks.setdefault(key, []).append(array)
            if name.block is not None:
                stacked.add(key)
    return {key: np.stack(arrays) if key in stacked else arrays[0] for key, arrays in blocks.items()}
