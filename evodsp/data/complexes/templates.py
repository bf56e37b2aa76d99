"""Templates of the chains of a record: each sequence has its own, found by itself, as in AlphaFold-Multimer.

Chains with one sequence have the same templates. Template k of a complex is template k of each chain, side by side. It does not
tell how the chains lie to each other, and the model does not compare its positions across chains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from evodsp.data.complexes.entities import Entity
from evodsp.data.records import ProteinSequence
from evodsp.data.sources.parsed import Parsed
from evodsp.data.templates.features import TemplateFeatures
from evodsp.data.templates.source import FoundTemplates, TemplateSource


def find_templates(source: TemplateSource, parsed: Parsed) -> dict[str, FoundTemplates]:
    """The templates of each sequence of a record. None is of the record's own entry or released after it.

    Raises UserError as `TemplateSource.find` does.
    """
    entry, released = parsed.assembly.pdb_id, parsed.assembly.chains[0].release_date
    names: dict[str, list[str]] = {}
    for key, chain in zip(parsed.assembly.keys, parsed.assembly.chains, strict=True):
        names.setdefault(chain.sequence, []).append(key)
    found = {}
    for letters, own in names.items():
        # A sequence is one of the chains that serve as templates if any of its copies is.
        name = next((name for name in own if source.lists(name)), own[0])
        hits = list(parsed.hits.get(letters, ()))
        found[letters] = source.find(hits, ProteinSequence(name, letters), released, entry)
    return found


def side_by_side(entities: Sequence[Entity], templates: Mapping[str, TemplateFeatures]) -> TemplateFeatures:
    """The templates of a complex whose chains stand in the order of `entities`, given those of each sequence.

    There are as many as the sequence with most of them has. Where another one has fewer, all numbers are 0, as in
    AlphaFold-Multimer's code: alanines without atoms. Names are those of all chains with ':' between them, '' for one that
    is not there. Scores of searches are of one chain each, so those of a complex are 0.
    """
    parts = [templates[entity.letters] for entity in entities for _ in entity.members]
    most = max(map(len, parts))

    def joined(name: str) -> np.ndarray:
        return np.concatenate([_filled_up(getattr(part, name), most) for part in parts], axis=1)

    names = [(*part.names, *[""] * (most - len(part))) for part in parts]
    return TemplateFeatures(
        names=tuple(":".join(of_chains) for of_chains in zip(*names, strict=True)),
        aatype=joined("aatype"),
        positions=joined("positions"),
        mask=joined("mask"),
        sum_probs=np.zeros(most, np.float32),
    )


def _filled_up(values: np.ndarray, rows: int) -> np.ndarray:
    """The values with as many rows of zeros after them as are missing."""
    return np.concatenate([values, np.zeros((rows - len(values), *values.shape[1:]), values.dtype)])
