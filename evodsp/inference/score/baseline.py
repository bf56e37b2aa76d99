"""The training chains or complexes that `evodsp score --baseline nearest` copies: their names, sequences and structures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from evodsp.data.doctor.config import DoctorConfig
from evodsp.data.doctor.run_data import data_of_run
from evodsp.data.executors import processes_for
from evodsp.data.records import Assembly
from evodsp.data.samples.selection import Presence, chain_list, select
from evodsp.data.similarity.comparison import Compared
from evodsp.data.similarity.nearest import Bar, PlacedCopy, Read, TrainingSet, bar
from evodsp.data.similarity.sequences import Letters, with_unlisted
from evodsp.data.sources.structures import AssemblyFolder, StructureFolder
from evodsp.errors import UserError
from evodsp.inference.score.config import ScoreConfig
from evodsp.printing import tell
from evodsp.reading.quoting import one_line

_IN_THIS_PROCESS = 2000
"""Keys whose sequences are read without further processes."""


class TrainingStructures(TrainingSet):
    """Training chains or complexes by key, with the sequences of their chains, none where they are unknown, and the reader of
    their structures. `truth`: the true structures of what is scored."""

    def __init__(self, sequences: Letters, read: Read, truth: StructureFolder) -> None:
        super().__init__(sequences)
        self._read, self._truth = read, truth

    def bars(self, splits: Mapping[str, Sequence[str]]) -> dict[str, Bar]:
        """What copying scores on each set that is not empty."""
        return {
            split: bar(
                f"{split} chain", _read_all(self._truth, keys), self.sequences, self._truth.assembly_of, self._read
            )
            for split, keys in splits.items()
            if keys
        }

    def placed_for(self, key: str, target: Assembly) -> PlacedCopy | str:
        """A copy in place of a target, or the reason why there is none."""
        return self.copy_for(key, target, self._read)


def training_set(settings: ScoreConfig, train: Sequence[str]) -> TrainingStructures:
    """What the settings name. `train`: the keys of --train, which are taken if nothing else names them.

    Raises UserError if there are none, or if no sequence of them can be read.
    """
    units = "complexes" if settings.complexes else "chains"
    truth = _folder(settings, settings.structures)
    read: Read
    if settings.config is None:
        keys = list(train) if settings.train_chains is None else chain_list(settings.train_chains)
        folder = _folder(settings, settings.structure_dir or settings.structures)
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
    return TrainingStructures(found, read, truth)


def _reason(read: Read, key: str) -> str:
    """Why a structure cannot be read."""
    try:
        read(key)
    except (UserError, OSError) as error:
        return one_line(str(error))
    return "its sequence is unknown"


def _folder(settings: ScoreConfig, directory: str | Path) -> StructureFolder:
    return AssemblyFolder(directory, settings.assembly) if settings.complexes else StructureFolder(directory)


def _read_all(folder: StructureFolder, keys: Sequence[str]) -> dict[str, tuple[str, ...]]:
    return with_unlisted(folder, dict.fromkeys(keys, ()), processes_for(len(keys), _IN_THIS_PROCESS))
