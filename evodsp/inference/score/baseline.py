"""The training chains or complexes that `evodsp score --baseline nearest` copies: their names, sequences and structures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evodsp import metrics
from evodsp.data.config import DoctorConfig
from evodsp.data.doctor.diagnosis import data_of_run
from evodsp.data.pool import processes_for
from evodsp.data.records import ONE_OF, Assembly
from evodsp.data.samples.selection import Presence, chain_list, select
from evodsp.data.similarity.nearest import Compared, PlacedCopy, Read, TrainingSet, placed_copies
from evodsp.data.similarity.sequences import with_unlisted
from evodsp.data.sources.structures import AssemblyFolder, StructureFolder
from evodsp.errors import UserError
from evodsp.inference.score.config import ScoreConfig
from evodsp.inference.score.structure_scores import Predicted, score_structure
from evodsp.printing import one_line, progress, tell

_IN_THIS_PROCESS = 2000
"""Keys whose sequences are read without further processes."""


@dataclass(frozen=True)
class TrainingStructures:
    """Training chains or complexes, with the sequences of their chains, and the reader of their structures."""

    known: TrainingSet
    read: Read

    def copies_for(self, keys: Sequence[str], truth: StructureFolder) -> dict[str, dict[str, Any] | str]:
        """Fields of `StructureScores` of a copy of each key's nearest training structure, or why there is none."""
        found: dict[str, dict[str, Any] | str] = {}
        with progress(f"copied the nearest for each {ONE_OF[truth.kind]}", len(keys)) as advance:
            for key, placed in placed_copies(_read_all(truth, keys), self.known, truth.assembly_of, self.read):
                found[key] = placed if isinstance(placed, str) else _scored(key, *placed)
                advance(1)
        return found


def _scored(key: str, copy: PlacedCopy, target: Assembly) -> dict[str, Any]:
    """Scores of a copy. Residues that it lacks are wrong, also of a single chain, which is therefore taken for a complex."""
    scored = score_structure(key, "", replace(target, key=None), Predicted(copy.assembly))
    found = {f"nearest_{name}": getattr(scored.scores, name) for name in ("dockq", "interface_lddt_ca", "lddt_ca")}
    if target.key is not None:
        found["nearest_gdt_ts"] = float(metrics.gdt_ts(*scored.comparison.alphas(scored.chosen)))
    return {"nearest": copy.nearest, "nearest_identity": copy.identity, "nearest_coverage": copy.coverage, **found}


def training_set(settings: ScoreConfig, train: Sequence[str]) -> TrainingStructures:
    """The training structures that the settings name. `train`: the keys of --train, which are taken if nothing else names them.

    Raises UserError if there are none, or if no sequence of them can be read.
    """
    units = "complexes" if settings.complexes else "chains"
    read: Read
    if settings.config is None:
        keys = list(train) if settings.train_chains is None else chain_list(settings.train_chains)
        folder = structures_in(settings, settings.structure_dir or settings.structures)
        found, read, where = _read_all(folder, keys), folder.assembly_of, str(folder.directory)
    else:
        given = DoctorConfig(
            settings.output, settings.config, structure_dir=settings.structure_dir, chains=settings.train_chains
        )
        run = data_of_run(given)
        data, store = run.training, run.training.examiner.store
        if store.kind != units:
            raise UserError(
                f"--config {settings.config}: trains on {store.kind}, but {units} are compared; give --complexes "
                f"{'false' if settings.complexes else 'true'}"
            )
        presence = Presence(store)
        listed = presence.training(data.training, (key for keys in run.scored.values() for key in keys))
        keys = select([key for key in listed if presence.lacks(key) is None], data.selection, store).keys
        found = Compared(store, data.selection.chain_data_cache).sequences(
            keys, {}, processes_for(len(keys), _IN_THIS_PROCESS)
        )
        read, where = store.assembly_of, data.place
    unknown = [key for key, sequences in found.items() if not sequences]
    if len(unknown) == len(found):
        such = f", such as {unknown[0]}: {_reason(read, unknown[0])}" if unknown else ""
        raise UserError(
            f"--baseline nearest: none of {len(found):,} training {units} can be read{such} ({where}); check the list of names "
            "and --structure_dir"
        )
    if unknown:
        tell(
            f"{len(unknown):,} of {len(found):,} training {units} cannot be read and are not copied, such as {unknown[0]}: "
            f"{_reason(read, unknown[0])}"
        )
    return TrainingStructures(TrainingSet(found), read)


def _reason(read: Read, key: str) -> str:
    """Why a structure cannot be read."""
    try:
        read(key)
    except (UserError, OSError) as error:
        return one_line(str(error))
    return "its sequence is unknown"


def structures_in(settings: ScoreConfig, directory: str | Path) -> StructureFolder:
    """A folder of structures of what the settings score: chains or complexes."""
    return AssemblyFolder(directory, settings.assembly) if settings.complexes else StructureFolder(directory)


def _read_all(folder: StructureFolder, keys: Sequence[str]) -> dict[str, tuple[str, ...]]:
    return with_unlisted(folder, dict.fromkeys(keys, ()), processes_for(len(keys), _IN_THIS_PROCESS))
