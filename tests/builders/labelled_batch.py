"""Random features with labels for every loss term, weights that switch every term on, and random outputs of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from evodsp.config import HeadsConfig, LossConfig
from evodsp.geometry.frames import Rigid, structure_labels
from evodsp.geometry.residues import RESTYPE_ATOM14_MASK, RESTYPE_ATOM37_MASK, RESTYPE_ORDER
from evodsp.losses.total import CHAIN, TERMS
from evodsp.model.heads import ModelOutput, StructureOutput
from evodsp.parallel.exchange import Exchange
from tests.builders.small_model import CYCLES, features

RESIDUES, CLUSTERS = 7, 5
_EVERY = {name: 0.9 - 0.07 * number for number, name in enumerate(TERMS)}
WEIGHTS = LossConfig(**{name: weight for name, weight in _EVERY.items() if CHAIN not in TERMS[name].features})
"""Every term of single chains is on, each with a weight of its own."""
CHAIN_WEIGHTS = LossConfig(**_EVERY, interface_clamp=11.0)
"""Every term is on, those of complexes too."""


class Source:
    """Random numbers from a seed: every rank draws the same ones."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self._generator)

    def mask(self, *shape: int) -> Tensor:
        """A random mask, zero for a fifth of its entries."""
        return (torch.rand(shape, generator=self._generator) > 0.2).double()


def batch_of(samples: int, residues: int = RESIDUES, chains: bool = False) -> dict[str, Tensor]:
    """Features [B, cycle, ...] and labels [B, ...]; the first sample ends in two residues of padding.

    `chains`: of complexes of three chains, which lie apart. Of seven residues, the last chain of the first sample is padding.
    """
    source = Source(samples)
    # Half of the residues have ambiguous atom names. Cysteines may form a disulfide bridge; proline has its own bond length.
    letters = torch.tensor([RESTYPE_ORDER[x] for x in ("DEFYCCPWKRGH" * residues)[:residues]])
    aatype = torch.stack([letters.roll(shift) for shift in range(samples)])
    seq_mask = torch.ones(samples, residues, dtype=torch.float64)
    seq_mask[0, -2:] = 0
    exists = torch.from_numpy(RESTYPE_ATOM37_MASK).double()[aatype] * seq_mask[..., None]
    observed = exists * source.mask(samples, residues, 37)
    observed[:, ::2, :5] = exists[:, ::2, :5]
    chain = 1 + (torch.arange(residues) > 2).long() + (torch.arange(residues) > 4) if chains else torch.ones(residues)
    positions = source.normal(samples, residues, 37, 3, scale=4) + 15 * (chain - 1)[:, None, None]
    positions = positions * observed[..., None]
    labels = [structure_labels(*(x[b] for x in (aatype, positions, observed))) for b in range(samples)]
    index = torch.arange(residues).repeat(samples, 1) + (torch.arange(residues) > 3) * 2  # a chain break
    if chains:
        index = (torch.arange(residues) - torch.searchsorted(chain, chain)).repeat(samples, 1)
    features = {
        "aatype": aatype,
        "residue_index": index * seq_mask.long(),
        "seq_mask": seq_mask,
        "atom37_atom_exists": exists,
        "atom14_atom_exists": torch.from_numpy(RESTYPE_ATOM14_MASK).double()[aatype] * seq_mask[..., None],
        "true_msa": source.integers(22, samples, CLUSTERS, residues),
        "bert_mask": source.mask(samples, CLUSTERS, residues) * seq_mask[:, None],
    }
    if chains:
        features[CHAIN] = chain * seq_mask.long()
    return {
        # Zeros in the first cycle: losses must read only the last cycle's features.
        **{key: torch.stack([torch.zeros_like(x), x], dim=1) for key, x in features.items()},
        **{key: torch.stack([label[key] for label in labels]) for key in labels[0] if key not in features},
        "resolution": torch.full((samples,), 2.0, dtype=torch.float64),
        "use_clamped_fape": torch.linspace(0.3, 1, samples, dtype=torch.float64),
    }


def whole_batch(samples: int, sizes: tuple[int, int, int]) -> dict[str, Tensor]:
    """Features of the model's input and labels, with padding and missing atoms. `sizes`: see `small_model.SMALL`."""
    clusters, _, residues = sizes
    generator = torch.Generator().manual_seed(2)
    shape = (samples, CYCLES, clusters, residues)
    return {
        **features(samples, sizes),
        **batch_of(samples, residues),
        "true_msa": torch.randint(22, shape, generator=generator),
        "bert_mask": (torch.rand(shape, generator=generator) > 0.3).double(),
    }


ITERATIONS = 3
# Few bins: `Largest` must find tensors of positions, so logits must not be larger.
HEADS = HeadsConfig(distogram_max_distance=12.0, distogram_bins=6, pae_bins=5)
Tensors = dict[str, Tensor]


def leaves_of(samples: int, residues: int = RESIDUES) -> Tensors:
    """Random model outputs in full, as leaves of the graph."""
    source, b, r, t = Source(10 + samples), samples, residues, ITERATIONS
    return {
        "backbone_rotation": torch.linalg.qr(source.normal(t, b, r, 3, 3)).Q,
        "backbone_translation": source.normal(t, b, r, 3, scale=5),
        "angles": torch.nn.functional.normalize(source.normal(t, b, r, 7, 2), dim=-1),
        "unnormalized_angles": source.normal(t, b, r, 7, 2),
        "frame_rotation": torch.linalg.qr(source.normal(b, r, 8, 3, 3)).Q,
        "frame_translation": source.normal(b, r, 8, 3, scale=5),
        "atom14": source.normal(b, r, 14, 3, scale=3),  # many clashes
        "positions": source.normal(b, r, 37, 3, scale=4),
        "plddt_logits": source.normal(b, r, HEADS.plddt_bins),
        "experimentally_resolved_logits": source.normal(b, r, 37),
        "distogram_logits": source.normal(b, r, r, HEADS.distogram_bins),
        "predicted_aligned_error_logits": source.normal(b, r, r, HEADS.pae_bins),
        "masked_msa_logits": source.normal(b, CLUSTERS, r, 23),
    }


def output_of(leaves: Tensors, exchange: Exchange) -> ModelOutput:
    """The model's output on this rank, made from `leaves`."""
    b, r = leaves["atom14"].shape[:2]
    here = exchange.owned(r)
    unread = leaves["atom14"].new_zeros
    structure = StructureOutput(
        backbone=Rigid(leaves["backbone_rotation"], leaves["backbone_translation"]),
        angles=leaves["angles"],
        unnormalized_angles=leaves["unnormalized_angles"],
        frames=Rigid(leaves["frame_rotation"], leaves["frame_translation"]),
        atom14=leaves["atom14"],
        positions=leaves["positions"],
        mask=unread(b, r, 37),
        single=unread(b, r, 4),
    )
    width = here.stop - here.start
    return ModelOutput(
        {
            "msa": unread(b, CLUSTERS, width, 2), "first_row": unread(b, r, 2), "pair": unread(b, r, width, 3),
            "single": unread(b, r, 4),
        },
        structure,
        {name.removesuffix("_logits"): leaf for name, leaf in leaves.items() if name.endswith("_logits")},
    )  # fmt: skip
