"""A family of single chains: one fold, one Potts model, and several members, each with a structure and alignments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
import torch
from jaxtyping import Float64, Int64

from evodsp.data.records import Chain
from evodsp.geometry import residues
from evodsp.geometry.frames import atom14_to_atom37
from evodsp.rng import Draws
from scripts.examples.synthetic.alignments import Homologs, draw_homologs
from scripts.examples.synthetic.backbone import CA, CB, build_backbone
from scripts.examples.synthetic.blueprint import Blueprint, make_blueprint
from scripts.examples.synthetic.config import FOLDS, SynthesisConfig
from scripts.examples.synthetic.folding import fold, vary
from scripts.examples.synthetic.sequences import PottsModel, make_potts_model, to_letters
from scripts.examples.synthetic.sidechains import place_side_chains

VARIANTS = 36
"""Starting points of the folding. The best third is refined, and the best result is kept."""
_FIRST_RELEASE = date(2020, 1, 1)


@dataclass(frozen=True)
class Family:
    """What the members of a family share: the fold, the backbone that theirs are relatives of, and the model of sequences."""

    blueprint: Blueprint
    torsions: Float64[np.ndarray, "R 2"]
    backbone: Float64[np.ndarray, "R 6 3"]
    model: PottsModel
    ancestor: Int64[np.ndarray, "1 R"]


@dataclass(frozen=True)
class Member:
    """One chain. `structure`: H, E or L for each residue. `alignments`: by file name; the query is the first row of each."""

    chain: Chain
    fold: str
    structure: str
    held_out: bool
    alignments: dict[str, Homologs]


def found_family(config: SynthesisConfig, number: int) -> Family:
    """Family number `number` (from 0)."""
    draws = family_draws(config, number)
    kind, length = FOLDS[number % len(FOLDS)], config.length(number)
    blueprint = make_blueprint(kind, length, VARIANTS, draws.at("blueprint"))
    torsions = fold(blueprint, draws.at("fold"))
    backbone = build_backbone(torsions)
    model = make_potts_model(blueprint.structure, torsions, backbone[:, CA], backbone[:, CB], draws.at("potts"))
    ancestor = model.sample(np.zeros((1, length), dtype=np.int64), 30, draws.at("ancestor"))
    return Family(blueprint, torsions, backbone, model, ancestor)


def family_draws(config: SynthesisConfig, number: int) -> Draws:
    """The stream of random numbers of family number `number`."""
    return Draws.root(config.seed).at("synthesize", number)


def make_family(config: SynthesisConfig, number: int) -> Iterator[Member]:
    """The members of family number `number` (from 0); held-out members come last."""
    draws, family = family_draws(config, number), found_family(config, number)
    count = config.members + config.held_out
    sequences = family.model.sample(np.repeat(family.ancestor, count, 0), 2, draws.at("descendants"), 0.5)
    for place in range(count):
        here = draws.at("member", place)
        backbone = build_backbone(vary(family.blueprint, family.torsions, here.at("shape")))
        types, atoms = place_side_chains(sequences[place], backbone, here.at("side chains"))
        serial = number * count + place + 1
        atoms = atoms - atoms[:, 1].mean(0)
        chain = make_chain(f"s{serial:03d}", "A", types, atoms, serial)
        alignments = {
            name: draw_homologs(
                family.model,
                types,
                family.blueprint.is_a("L"),
                chain.key,
                f"{prefix}_{chain.pdb_id}_",
                config.sequences,
                here.at(name),
            )
            for name, prefix in (("bfd_uniclust_hits.a3m", "SYNA"), ("uniref90_hits.sto", "SYNB"))
        }
        yield Member(chain, family.blueprint.fold, family.blueprint.structure, place >= config.members, alignments)


def make_chain(
    pdb_id: str, chain_id: str, types: Int64[np.ndarray, " R"], atoms: Float64[np.ndarray, "R 14 3"], serial: int
) -> Chain:
    """The record of a chain, with residues numbered from 1. `serial`: of its entry; entries are released once a week."""
    atom37 = atom14_to_atom37(torch.from_numpy(atoms), torch.from_numpy(types)).numpy()
    mask = residues.RESTYPE_ATOM37_MASK[types]
    return Chain(
        pdb_id=pdb_id,
        chain_id=chain_id,
        sequence=to_letters(types),
        residue_number=np.arange(1, len(types) + 1, dtype=np.int32),
        insertion_code=("",) * len(types),
        is_missing=np.zeros(len(types), dtype=bool),
        positions=(atom37 * mask[..., None]).astype(np.float32),
        mask=mask.astype(np.float32),
        # The pLDDT loss counts only structures with a resolution of 0.1 to 3 Å.
        resolution=1.0,
        method="THEORETICAL MODEL",
        release_date=_FIRST_RELEASE + timedelta(weeks=serial),
    )
