"""A family: one fold, one Potts model, and several members, each with a structure and alignments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
import torch

from evodsp.data.records import Chain
from evodsp.geometry import residues
from evodsp.geometry.frames import atom14_to_atom37
from evodsp.rng import Draws
from scripts.examples.synthetic.alignments import Homologs, draw_homologs
from scripts.examples.synthetic.backbone import CA, CB, build_backbone
from scripts.examples.synthetic.blueprint import make_blueprint
from scripts.examples.synthetic.config import FOLDS, SynthesisConfig
from scripts.examples.synthetic.folding import fold, vary
from scripts.examples.synthetic.sequences import make_potts_model, to_letters
from scripts.examples.synthetic.sidechains import place_side_chains

VARIANTS = 36
"""Starting points of the folding. The best third is refined, and the best result is kept."""
_FIRST_RELEASE = date(2020, 1, 1)


@dataclass(frozen=True)
class Member:
    """One chain. `structure`: H, E or L for each residue. `alignments`: by file name; the query is the first row of each."""

    chain: Chain
    fold: str
    structure: str
    held_out: bool
    alignments: dict[str, Homologs]


def make_family(config: SynthesisConfig, family: int) -> Iterator[Member]:
    """The members of family number `family` (from 0); held-out members come last."""
    draws = Draws.root(config.seed).at("synthesize", family)
    kind, length = FOLDS[family % len(FOLDS)], config.length(family)
    blueprint = make_blueprint(kind, length, VARIANTS, draws.at("blueprint"))
    torsions = fold(blueprint, draws.at("fold"))
    backbone = build_backbone(torsions)
    model = make_potts_model(blueprint.structure, torsions, backbone[:, CA], backbone[:, CB], draws.at("potts"))
    count = config.members + config.held_out
    ancestor = model.sample(np.zeros((1, length), dtype=np.int64), 30, draws.at("ancestor"))
    sequences = model.sample(np.repeat(ancestor, count, 0), 2, draws.at("descendants"), 0.5)
    for number in range(count):
        here = draws.at("member", number)
        member_backbone = build_backbone(vary(blueprint, torsions, here.at("shape")))
        types, atoms = place_side_chains(sequences[number], member_backbone, here.at("side chains"))
        serial = family * count + number + 1
        chain = _chain(f"s{serial:03d}", types, atoms, _FIRST_RELEASE + timedelta(weeks=serial))
        alignments = {
            name: draw_homologs(
                model,
                types,
                blueprint.is_a("L"),
                chain.key,
                f"{prefix}_{chain.pdb_id}_",
                config.sequences,
                here.at(name),
            )
            for name, prefix in (("bfd_uniclust_hits.a3m", "SYNA"), ("uniref90_hits.sto", "SYNB"))
        }
        yield Member(chain, kind, blueprint.structure, number >= config.members, alignments)


def _chain(pdb_id: str, types: np.ndarray, atoms: np.ndarray, day: date) -> Chain:
    """The chain record of a member, centred at the origin, with residues numbered from 1."""
    atom37 = atom14_to_atom37(torch.from_numpy(atoms), torch.from_numpy(types)).numpy()
    mask = residues.RESTYPE_ATOM37_MASK[types]
    centred = (atom37 - atom37[:, residues.CA].mean(0)) * mask[..., None]
    return Chain(
        pdb_id=pdb_id,
        chain_id="A",
        sequence=to_letters(types),
        residue_number=np.arange(1, len(types) + 1, dtype=np.int32),
        insertion_code=("",) * len(types),
        is_missing=np.zeros(len(types), dtype=bool),
        positions=centred.astype(np.float32),
        mask=mask.astype(np.float32),
        # The pLDDT loss counts only structures with a resolution of 0.1 to 3 Å.
        resolution=1.0,
        method="THEORETICAL MODEL",
        release_date=day,
    )
