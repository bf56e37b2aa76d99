"""The subject of a comparison: dense random parameters, features with padding in every mask, and a structure, from one seed.

No file is read. Parameters are dense because AF2 initialises many layers with zeros, and a layer of zeros hides every error
before it. Features may be random, but structures must be realistic: torsions and frames of coinciding atoms are rounding noise.
So the label and the templates are ideal chains.

Shape legend: L real residues, R residues with padding, S clusters, E extra sequences, T templates.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Int64

from evodsp.config import ModelConfig
from evodsp.geometry.frames import atom14_to_atom37, pseudo_beta
from evodsp.geometry.residues import RESTYPE_ATOM14_MASK, RESTYPE_ATOM37_MASK
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.deepmind import expected_shapes
from evodsp.weights.names import parameter_names
from scripts.examples.synthetic.backbone import build_backbone
from scripts.examples.synthetic.sidechains import all_atoms

LETTERS = 23
"""Letters of an alignment: 20 amino acids, unknown, gap, mask."""
TYPES = 20


@dataclass(frozen=True)
class Sizes:
    """Sizes of the features. Padding is at the end of each axis."""

    residues: int = 48
    """Real residues."""
    padded_residues: int = 6
    clusters: int = 14
    """Rows of the MSA, the padded ones included."""
    extra: int = 22
    """Rows of the extra MSA, the padded ones included."""
    padded_rows: int = 2
    """Padded rows at the end of either MSA."""
    templates: int = 4
    """Templates; the last one is masked."""
    cycles: int = 2
    """Recycling passes; each has features of its own."""

    @property
    def length(self) -> int:
        return self.residues + self.padded_residues


@dataclass(frozen=True)
class Subject:
    """The input of every side: DeepMind's arrays, features [cycle, …], and the atoms [R, …] of the label."""

    parameters: dict[str, np.ndarray]
    features: dict[str, np.ndarray]
    structure: dict[str, np.ndarray]

    @classmethod
    def draw(cls, config: ModelConfig, sizes: Sizes, seed: int, fused: bool) -> Subject:
        features = random_features(sizes, seed)
        if config.arrangement == "multimer":
            features = with_chains(features, sizes)
        structure = random_structure(features["aatype"][-1], sizes, seed)
        return cls(random_parameters(config, seed, fused), features, structure)

    def flat(self) -> dict[str, np.ndarray]:
        """All arrays in one dictionary, `<part>:<name>`."""
        parts = {"parameters": self.parameters, "features": self.features, "structure": self.structure}
        return {f"{part}:{name}": values for part, arrays in parts.items() for name, values in arrays.items()}


def shallow(
    config: ModelConfig, evoformer: int, extra_msa: int, template: int, structure_iterations: int
) -> ModelConfig:
    """A preset with shorter stacks and unchanged widths."""
    return dataclasses.replace(
        config,
        evoformer=dataclasses.replace(config.evoformer, blocks=evoformer),
        extra_msa=dataclasses.replace(config.extra_msa, blocks=extra_msa),
        templates=dataclasses.replace(config.templates, blocks=template),
        structure_module=dataclasses.replace(config.structure_module, iterations=structure_iterations),
    )


def random_parameters(config: ModelConfig, seed: int, fused: bool) -> dict[str, np.ndarray]:
    """Dense random values for all of DeepMind's arrays. `fused`: the newer layout of triangle multiplication.

    Weights N(0, 1 / inputs), LayerNorm scales, gate biases and point weights 1 + N(0, 0.01), other biases N(0, 0.01).
    """
    with torch.device("meta"):
        model = AlphaFold(config)
    names = parameter_names(config, fused)
    layouts = {key: (name.layout, name.block is not None) for name in names for key in name.keys}
    rng = np.random.default_rng([seed, 0])
    arrays = {}
    for key, shape in sorted(expected_shapes(model, names).items()):
        layout, stacked = layouts[key]
        draws = rng.standard_normal(shape, dtype=np.float32)
        if layout in ("vector", "no_input"):
            arrays[key] = np.float32(_starts_at_one(key)) + np.float32(0.1) * draws
        else:
            one = shape[1:] if stacked else shape
            inputs = one[0] if layout == "input_first" else int(np.prod(one[:-1]))
            arrays[key] = draws / np.float32(np.sqrt(inputs))
    return arrays


def _starts_at_one(key: str) -> bool:
    scope, parameter = key.split("//")
    gate = parameter == "gating_b" or (parameter == "bias" and "gat" in scope.rsplit("/", 1)[-1])
    return gate or parameter in ("scale", "trainable_point_weights")


def random_chain(
    types: Int64[np.ndarray, " L"], rng: np.random.Generator
) -> tuple[Float[np.ndarray, "L 37 3"], Float[np.ndarray, "L 37"]]:
    """A chain of ideal bonds, angles and rings in a random fold: atom37 positions in Å and which atoms there are.

    It may run through itself. Its first N lies at (4, 0, 0), off the origin: AF2 takes the atoms of the residue before the
    first as lying at the origin, and does not mask the torsions that follow from them.
    """
    helical = rng.random((len(types), 1)) < 0.5
    torsions = np.radians(np.where(helical, (-60.0, -45.0), (-120.0, 130.0)) + rng.normal(0, 12, (len(types), 2)))
    chi = rng.uniform(-np.pi, np.pi, (len(types), 4))
    atom14 = torch.from_numpy(all_atoms(types, chi, build_backbone(torsions)))
    atom14 = atom14 - atom14[0, 0] + torch.tensor([4.0, 0.0, 0.0], dtype=atom14.dtype)
    atom14 = atom14 * torch.from_numpy(RESTYPE_ATOM14_MASK[types])[..., None]
    kinds = torch.from_numpy(types)
    return atom14_to_atom37(atom14, kinds).float().numpy(), RESTYPE_ATOM37_MASK[types].astype(np.float32)


def random_structure(aatype: Int[np.ndarray, " R"], sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """`all_atom_positions` [R, 37, 3] in Å, `all_atom_mask` [R, 37]; 4 % of the atoms and three residues are missing."""
    rng = np.random.default_rng([seed, 1])
    real = slice(sizes.residues)
    positions, mask = np.zeros((sizes.length, 37, 3)), np.zeros((sizes.length, 37))
    positions[real], mask[real] = random_chain(aatype[real].astype(np.int64), rng)
    mask *= rng.random(mask.shape) > 0.04
    mask[rng.choice(sizes.residues, 3, replace=False)] = 0
    arrays = {"all_atom_positions": positions * mask[..., None], "all_atom_mask": mask, "resolution": np.array(1.8)}
    return {name: _narrow(values) for name, values in arrays.items()}


def random_features(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """AF2's processed features, axes [cycle, …], int32 and float32, padded."""
    rng = np.random.default_rng([seed, 2])
    types = np.concatenate([rng.permutation(TYPES), rng.integers(0, TYPES, sizes.residues)])[: sizes.residues]
    aatype = np.zeros(sizes.length, np.int32)
    aatype[: sizes.residues] = types
    seq_mask = (np.arange(sizes.length) < sizes.residues).astype(np.float32)
    index = np.arange(sizes.length, dtype=np.int32)
    index[sizes.residues // 2 :] += 5  # a gap in the numbering: no peptide bond there
    target = np.eye(22, dtype=np.float32)[aatype + 1] * seq_mask[:, None]
    exists = {
        "atom14_atom_exists": RESTYPE_ATOM14_MASK[aatype].astype(np.float32) * seq_mask[:, None],
        "atom37_atom_exists": RESTYPE_ATOM37_MASK[aatype].astype(np.float32) * seq_mask[:, None],
    }
    templates = _templates(sizes, seed)
    per_cycle = []
    for cycle in range(sizes.cycles):
        draws = np.random.default_rng([seed, 3, cycle])
        msa_mask, extra_mask = (_mask(draws, rows, sizes) for rows in (sizes.clusters, sizes.extra))
        extra_shape = (sizes.extra, sizes.length)
        has_deletion = (draws.random(extra_shape) < 0.2) * extra_mask
        cluster_shape = (sizes.clusters, sizes.length)
        per_cycle.append(
            {
                "aatype": aatype,
                "residue_index": index,
                "seq_mask": seq_mask,
                "target_feat": target,
                **exists,
                "msa_feat": draws.standard_normal((*cluster_shape, 49)) * msa_mask[..., None],
                "msa_mask": msa_mask,
                "true_msa": draws.integers(0, LETTERS, cluster_shape, dtype=np.int32),
                "bert_mask": (draws.random(cluster_shape) < 0.3) * msa_mask,
                "extra_msa": draws.integers(0, LETTERS, extra_shape, dtype=np.int32),
                "extra_msa_mask": extra_mask,
                "extra_has_deletion": has_deletion,
                "extra_deletion_value": draws.random(extra_shape) * has_deletion,
                **templates,
            }
        )
    stacked = {name: np.stack([features[name] for features in per_cycle]) for name in per_cycle[0]}
    return {name: _narrow(values) for name, values in stacked.items()}


def with_chains(features: dict[str, np.ndarray], sizes: Sizes) -> dict[str, np.ndarray]:
    """The features as AlphaFold-Multimer reads them, of three chains: one of its own sequence and two copies of another."""
    first, copy = sizes.residues // 2, sizes.residues // 4
    lengths = [first, copy, sizes.residues - first - copy, sizes.padded_residues]
    numbers = {"asym_id": (1, 2, 3, 0), "entity_id": (1, 2, 2, 0), "sym_id": (1, 1, 2, 0)}
    chains = {name: np.repeat(np.array(of, np.int32), lengths) for name, of in numbers.items()}
    index = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    target = np.eye(21, dtype=np.float32)[features["aatype"]]
    own = {name: np.stack([x] * sizes.cycles) for name, x in {**chains, "residue_index": index}.items()}
    kept = {name: x for name, x in features.items() if name != "template_mask"}
    return {**kept, **own, "target_feat": target}


def _mask(rng: np.random.Generator, rows: int, sizes: Sizes) -> Float[np.ndarray, "rows R"]:
    """Padded rows and residues, and one letter in twenty by itself; the query's row is whole."""
    mask = (rng.random((rows, sizes.length)) > 0.05).astype(np.float32)
    mask[0] = 1
    mask[rows - sizes.padded_rows :] = 0
    mask[:, sizes.residues :] = 0
    return mask


def _templates(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """Each template covers the query from its start to somewhere in its second half.

    Without gaps: AF2 does not mask the torsions of the first residue after one, which are then rounding noise.
    """
    rng = np.random.default_rng([seed, 4])
    shape = (sizes.templates, sizes.length)
    aatype, positions, mask = np.zeros(shape, np.int64), np.zeros((*shape, 37, 3)), np.zeros((*shape, 37))
    for template in range(sizes.templates - 1):
        covered = sizes.residues if template == 0 else int(rng.integers(sizes.residues // 2, sizes.residues))
        types = rng.integers(0, TYPES, covered)
        aatype[template, :covered] = types
        positions[template, :covered], mask[template, :covered] = random_chain(types, rng)
    beta, beta_mask = pseudo_beta(torch.from_numpy(aatype), torch.from_numpy(positions), torch.from_numpy(mask))
    return {
        "template_aatype": aatype,
        "template_all_atom_positions": positions,
        "template_all_atom_masks": mask,
        "template_pseudo_beta": beta.numpy(),
        "template_pseudo_beta_mask": beta_mask.numpy(),
        "template_mask": np.arange(sizes.templates) < sizes.templates - 1,
    }


def _narrow(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int32 if values.dtype.kind == "i" else np.float32)
