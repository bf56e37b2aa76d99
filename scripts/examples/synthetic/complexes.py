"""Families of complexes: two chains, one interface, and several members, each with a structure and alignments.

The chains are of families of single chains (`families`), and several families of complexes have the same two folds and models
of sequences, but another interface. What tells them apart are the rows of both chains that belong together: those of one
species in `uniprot_hits`. Rows of `uniref90_hits` are of one chain alone.

Shapes: R residues of both chains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
from jaxtyping import Float64, Int64

from evodsp.rng import Draws
from scripts.examples.synthetic.alignments import Homologs, draw_homologs, draw_relatives, with_gaps
from scripts.examples.synthetic.assemblies import Pose, centred, dock
from scripts.examples.synthetic.backbone import CA, CB, build_backbone
from scripts.examples.synthetic.config import SynthesisConfig
from scripts.examples.synthetic.families import Family, Member, found_family, make_chain
from scripts.examples.synthetic.folding import superpose, vary
from scripts.examples.synthetic.interfaces import couple_copies, partners, touching
from scripts.examples.synthetic.sequences import PottsModel
from scripts.examples.synthetic.sidechains import place_side_chains

PAIRED, UNPAIRED = "uniprot_hits.a3m", "uniref90_hits.sto"
PAIRED_PER_UNPAIRED = 4
"""How many times as many rows a heterodimer's `uniprot_hits` has as its `uniref90_hits`."""
_VARIATION = (0.2, 0.45)
"""RMSD in Å of the CA atoms of a member's chain from its family's."""
_OVERLAP = 0.4
"""How much nearer than contact the backbones of a member's chains may come, in Å, so that they keep their family's distance."""
TEMPERATURE = 2.0
"""Of the sequences of chains in complexes; that of single chains is 1. Interfaces are surfaces, which vary more than cores."""
_SWEEPS = 6
"""Of Gibbs sampling for paired rows. Rows nearer to the query would all have the query's interface, paired rightly or not."""
_OF_PAIRED_ROWS = 3.0
"""How much higher the temperature of a heterodimer's paired rows is. Columns that hardly vary cannot co-vary."""
_POOL = 8
"""Relatives of each chain that find a partner, for each row that is written: the more there are, the better partners fit."""
_DESCENT = (4, 0.5)
"""Sweeps of Gibbs sampling, and the part of the residues redrawn in each, from the ancestors of two families to a complex."""

_DESCENT_OF_TWINS = (1, 0.1)
"""The same of twins, whose queries differ less. A model adds the query to each row before outer products: where queries differ
much, the product of their letters varies more between complexes than what co-varies."""


@dataclass(frozen=True)
class ComplexFamily:
    """Two families of chains, the pose of the second beside the first, the pairs of residues that touch, and the models of the
    sequences: of each chain, or of the one that both copies in a homodimer have."""

    chains: tuple[Family, Family]
    pose: Pose
    poses: tuple[Pose, ...]
    """A sequence must fit in all of these: its own pose, or of twins the poses of all families with these chains."""
    origin: int
    """The family whose random stream makes the members: this one, or of twins the first one with these chains."""
    touching: Int64[np.ndarray, "K 2"]
    models: tuple[PottsModel, ...]

    @property
    def is_homodimer(self) -> bool:
        return len(self.models) == 1


def make_complexes(config: SynthesisConfig) -> Iterator[tuple[Member, ...]]:
    """The chains of each complex, family after family; held-out members come last."""
    serial = 0
    for family in _families(config):
        draws = Draws.root(config.seed).at("complexes", family.origin)
        for place in range(config.members + config.held_out):
            serial += 1
            yield _member(config, family, serial, place >= config.members, draws.at("member", place))


def _families(config: SynthesisConfig) -> Iterator[ComplexFamily]:
    """Heterodimers of all pairs of the families of chains in turn, then homodimers of each family in turn."""
    draws = Draws.root(config.seed).at("interfaces")
    chains = cache(lambda number: found_family(config, number))
    pairs = list(combinations(range(config.families), 2))
    heterodimers = config.complexes - config.homodimers
    wanted = [pairs[n % len(pairs)] for n in range(heterodimers)]
    wanted += [(n % config.families,) * 2 for n in range(config.homodimers)]

    @cache
    def poses(first: int, second: int) -> list[Pose]:
        one, other = (centred(chains(number).backbone) for number in (first, second))
        return dock(one, other, wanted.count((first, second)), first == second, draws.at("dock", first, second))

    for number, (first, second) in enumerate(wanted):
        families = chains(first), chains(second)
        docked, here = poses(first, second), draws.at("couple", number)
        pose = docked[wanted[:number].count((first, second))]
        one, other = (centred(family.backbone) for family in families)
        touch = touching(one[:, CB], pose.place(one, other)[:, CB])
        own, partner = (family.model.heated(TEMPERATURE) for family in families)
        models = (couple_copies(own, touch, here),) if first == second else (own, partner)
        twins = config.twins and first != second
        origin = wanted.index((first, second)) if twins else number
        yield ComplexFamily(families, pose, tuple(docked) if twins else (pose,), origin, touch, models)


def _member(
    config: SynthesisConfig, family: ComplexFamily, serial: int, held_out: bool, draws: Draws
) -> tuple[Member, ...]:
    """The chains A and B of a complex."""
    entry = f"c{serial:03d}"
    backbones = _backbones(family, draws)
    types, atoms = _side_chains(family, backbones, draws)
    spans = slice(len(backbones[0])), slice(len(backbones[0]), None)
    alignments = _alignments(config, family, entry, types, draws)
    return tuple(
        Member(
            make_chain(entry, name, types[span], atoms[span], serial),
            chain.blueprint.fold,
            chain.blueprint.structure,
            held_out,
            own,
        )
        for name, chain, span, own in zip("AB", family.chains, spans, alignments, strict=True)
    )


def _backbones(family: ComplexFamily, draws: Draws) -> list[Float64[np.ndarray, "r 6 3"]]:
    """Relatives of the chains' backbones, each centred; the copies of a homodimer differ less."""
    first, second = family.chains
    torsions = [vary(first.blueprint, first.torsions, draws.at("shape", 0), *_VARIATION)]
    if family.is_homodimer:
        torsions.append(vary(first.blueprint, torsions[0], draws.at("shape", 1), 0.1, 0.3))
    else:
        torsions.append(vary(second.blueprint, second.torsions, draws.at("shape", 1), *_VARIATION))
    placed = []
    for chain, own in zip(family.chains, torsions, strict=True):
        atoms = build_backbone(own)
        placed.append(superpose(atoms[:, CA], centred(chain.backbone)[:, CA], atoms))
    return placed


def _side_chains(
    family: ComplexFamily, backbones: list[np.ndarray], draws: Draws
) -> tuple[Int64[np.ndarray, " R"], Float64[np.ndarray, "R 14 3"]]:
    """The sequences of both chains, and all their heavy atoms in the family's pose, which differs a little from member to
    member. A residue without room in any of the poses is replaced."""
    sequence, twins = draws.at("sequence"), len(family.poses) > 1
    sweeps, part = _DESCENT_OF_TWINS if twins else _DESCENT
    types = np.concatenate(
        [
            model.sample(chain.ancestor, sweeps, sequence.at(place), part)[0]
            for place, (model, chain) in enumerate(zip(family.models, family.chains, strict=False))
        ]
    )
    while twins:
        before = types
        for pose in family.poses:
            types, _ = _side_chains_in(family, pose, types, backbones, draws)
        if np.array_equal(before, types):
            break
    return _side_chains_in(family, family.pose, types, backbones, draws)


def _side_chains_in(
    family: ComplexFamily, pose: Pose, types: Int64[np.ndarray, "..."], backbones: list[np.ndarray], draws: Draws
) -> tuple[Int64[np.ndarray, " R"], Float64[np.ndarray, "R 14 3"]]:
    """As `_side_chains`, in one pose. A residue without room in one copy of a homodimer is replaced in both. `types`: of both
    chains, or of the one that a homodimer has."""
    one, other = backbones
    size = len(one)
    backbone = np.concatenate([one, pose.shaken(draws.at("pose")).place(one, other, _OVERLAP)])
    bonded = np.arange(1, len(backbone)) != size
    while True:
        placed, atoms = place_side_chains(np.resize(types, len(backbone)), backbone, draws.at("side chains"), bonded)
        first, second = placed[:size], placed[size:]
        if not family.is_homodimer or np.array_equal(first, second):
            return placed, atoms
        types = np.where(first == types, second, first)


def _alignments(
    config: SynthesisConfig, family: ComplexFamily, entry: str, types: Int64[np.ndarray, " R"], draws: Draws
) -> list[dict[str, Homologs]]:
    """The alignments of each chain by file name. Copies of a chain need them once."""
    loops = [chain.blueprint.is_a("L") for chain in family.chains]
    queries = np.split(types, [len(loops[0])])
    paired = _paired_rows(config, family, queries, draws.at("paired"))
    alignments: list[dict[str, Homologs]] = []
    for place, name in enumerate("AB"):
        if place and family.is_homodimer:
            return [*alignments, {}]
        here, key = draws.at("alignments", place), f"{entry}_{name}"
        species = np.arange(1, config.sequences)
        if place and config.shuffled:
            species = species[here.at("shuffle").permutation(len(species))]
        names = (key, *(_uniprot_name(name, int(number)) for number in species))
        count = config.sequences if family.is_homodimer else _unpaired(config)
        alignments.append(
            {
                PAIRED: with_gaps(paired[place], loops[place], names, here.at(PAIRED)),
                UNPAIRED: draw_homologs(
                    family.models[place], queries[place], loops[place], key, f"SYNB_{entry}_", count, here.at(UNPAIRED)
                ),
            }
        )
    return alignments


def _paired_rows(
    config: SynthesisConfig, family: ComplexFamily, queries: list[np.ndarray], draws: Draws
) -> list[Int64[np.ndarray, "S r"]]:
    """The rows of each chain, the query first. Those of a heterodimer are drawn without the partner and paired afterwards: no
    row of one chain tells where the other binds, and not even all of them do."""
    count = config.sequences if family.is_homodimer else 1 + _POOL * (config.sequences - 1)
    models = family.models if family.is_homodimer else [model.heated(_OF_PAIRED_ROWS) for model in family.models]
    rows = [
        draw_relatives(model, query, count, draws.at(place), _SWEEPS)
        for place, (model, query) in enumerate(zip(models, queries, strict=False))
    ]
    if not family.is_homodimer:
        first, second = rows
        second[1:] = second[1:][partners(first[1:], second[1:], family.touching)]
    return [each[: config.sequences] for each in rows]


def _unpaired(config: SynthesisConfig) -> int:
    """Rows of a heterodimer's `uniref90_hits`."""
    return max(2, config.sequences // PAIRED_PER_UNPAIRED)


def _uniprot_name(chain: str, number: int) -> str:
    """A name as UniProt's: a protein of the species `number`."""
    digits = np.base_repr(number, 36)
    accession = f"A0{chain}{digits.zfill(7)}"
    return f"tr|{accession}|{accession}_{digits.zfill(5)}"
