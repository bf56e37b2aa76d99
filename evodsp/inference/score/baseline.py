"""The training chains or complexes that `evodsp score --baseline nearest` copies: their names, sequences and structures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evodsp.data.doctor.config import DoctorConfig
from evodsp.data.doctor.examination import ChainExaminer
from evodsp.data.doctor.run_data import data_of_run
from evodsp.data.executors import processes
from evodsp.data.samples.selection import Presence, chain_list, select
from evodsp.data.similarity.nearest import Bar, Structures, bar
from evodsp.data.similarity.nearest_complex import TrainingComplexes
from evodsp.data.similarity.sequences import sequences
from evodsp.data.sources.structures import StructureFolder
from evodsp.errors import UserError
from evodsp.inference.score.config import ScoreConfig
from evodsp.printing import tell
from evodsp.progress import progress
from evodsp.reading.quoting import one_line

_IN_THIS_PROCESS = 2000
"""Chains whose sequences are read without further processes."""


@dataclass(frozen=True)
class TrainingChains:
    """Training chains by key, with their sequences ('' where unknown), and the source of their structures."""

    sequences: Mapping[str, str]
    structures: Structures

    def bars(self, structures: Path, splits: Mapping[str, Sequence[str]]) -> dict[str, Bar]:
        """What copying scores on each set of chains that is not empty. `structures`: the folder of their structures."""
        truth = StructureFolder(structures)
        return {
            split: bar(split, _sequences(truth, keys), self.sequences, truth, self.structures)
            for split, keys in splits.items()
            if keys
        }


def training_chains(settings: ScoreConfig, train: Sequence[str]) -> TrainingChains:
    """The chains that the settings name. `train`: those of --train, which are taken if nothing else names them.

    Raises UserError if there are none, or if no sequence of them can be read.
    """
    structures: Structures
    if settings.config is None:
        keys = list(train) if settings.train_chains is None else chain_list(settings.train_chains)
        folder = _folder(settings)
        found, structures, where = _sequences(folder, keys), folder, str(folder.directory)
    else:
        given = DoctorConfig(
            settings.output, settings.config, structure_dir=settings.structure_dir, chains=settings.train_chains
        )
        run = data_of_run(given)
        data = run.training
        if not isinstance(data.examiner, ChainExaminer):
            raise UserError(
                f"--config {settings.config}: trains on complexes, but single chains are compared; give --complexes true with "
                "--train_chains"
            )
        store = data.examiner.store
        presence = Presence(store)
        listed = presence.training(data.training, (key for keys in run.scored.values() for key in keys))
        keys = select([key for key in listed if presence.lacks(key) is None], data.selection, store).keys
        found = sequences(data.examiner.source, keys, {}, data.selection.chain_data_cache, _processes(keys))
        structures, where = store, data.place
    unknown = [key for key, sequence in found.items() if not sequence]
    if len(unknown) == len(found):
        such = f", such as {unknown[0]}" if unknown else ""
        raise UserError(
            f"--baseline nearest: none of {len(found):,} training chains can be read{such} ({where}); check the list of chains "
            "and --structure_dir"
        )
    if unknown:
        tell(
            f"{len(unknown):,} of {len(found):,} training chains cannot be read and are not copied, such as {unknown[0]}"
        )
    return TrainingChains(found, structures)


def training_complexes(settings: ScoreConfig, train: Sequence[str]) -> TrainingComplexes:
    """The complexes that the settings name. `train`: those of --train, which are taken if nothing else names them.

    Raises UserError if there are none, or if no structure of them can be read.
    """
    names = list(train) if settings.train_chains is None else chain_list(settings.train_chains)
    folder = _folder(settings)
    found: dict[str, tuple[str, ...]] = {}
    problem = ""
    with progress("read training complexes", len(names)) as advance:
        for name in names:
            try:
                found[name] = tuple(chain.sequence for chain in folder.assembly(name, settings.assembly).chains)
            except (UserError, OSError) as error:
                problem = problem or one_line(str(error))
            advance(1)
    if not found:
        raise UserError(
            f"--baseline nearest: none of {len(names):,} training complexes can be read ({problem or 'there are none'}); "
            "check the list of names and --structure_dir"
        )
    if problem:
        lost = len(names) - len(found)
        tell(f"{lost:,} of {len(names):,} training complexes cannot be read and are not copied ({problem})")
    return TrainingComplexes(found, lambda name: folder.assembly(name, settings.assembly))


def _folder(settings: ScoreConfig) -> StructureFolder:
    """Where the training structures are, if no run names their folder."""
    return StructureFolder(settings.structure_dir or settings.structures)


def _sequences(folder: StructureFolder, keys: Sequence[str]) -> dict[str, str]:
    return sequences(folder, keys, {}, None, _processes(keys))


def _processes(keys: Sequence[str]) -> int:
    return 1 if len(keys) <= _IN_THIS_PROCESS else processes(None)
