"""Self-distillation sets: predicted structures as training targets (supplement 1.3).

The prediction's confidence stands in the B-factors. Atoms of residues below a pLDDT are masked, so that nothing is learned
from parts of which the prediction was unsure. A predicted structure has no resolution, so losses that need an experiment's do
not count it (unless one is assumed), and no release date, so its templates need `data.max_template_date`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evodsp.data.sources.opening import Records, Unit, open_files, open_store
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import UserError


def open_predictions(
    alignment_dir: str | None,
    structure_dir: str | None,
    index: str | None,
    store: str | None,
    min_plddt: float,
    unit: Unit = Unit(),  # noqa: B008 (frozen)
) -> Records | None:
    """The records of a self-distillation set, given its settings in `data.distillation`; None if they name none.

    Raises UserError that names the setting.
    """
    if store is not None:
        built = open_store(store, unit, setting="data.distillation.store")
        if built.min_plddt is None:
            raise UserError(
                f"data.distillation.store is {store}, which was built without --min_plddt, so nothing in it is masked; build "
                f"it with --min_plddt {min_plddt:g}"
            )
        if built.min_plddt != min_plddt:
            raise UserError(
                f"data.distillation.min_plddt is {min_plddt:g}, but {store} was built with --min_plddt {built.min_plddt:g}; "
                "set it to that, or build the store again"
            )
        return built
    if alignment_dir is None or structure_dir is None:
        return None
    for name, path in (("alignment_dir", alignment_dir), ("structure_dir", structure_dir)):
        if not Path(path).is_dir():
            raise UserError(
                f"data.distillation.{name} is {path}, which is not a folder; give the folder, or leave it out"
            )
    return open_files(alignment_dir, structure_dir, index, unit, min_plddt)


@dataclass(frozen=True)
class DistillationSet:
    """A self-distillation set as samples are made of it. Picklable, for workers."""

    source: Records
    """The source of its chains: their files, or a feature store that was built of them."""
    max_rows: int
    """Most rows of an MSA that are used; they are a random sample."""
    templates: TemplateSource | None = None
    """The source of templates for its chains; None if samples have none."""
    assumed_resolution: float | None = None
    """The resolution in Å that its chains, which have none, are given; with None the losses of the confidence heads do not
    count them."""
