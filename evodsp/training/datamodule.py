"""Chains on disk as streams of training and validation batches."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import BatchSampler, Sampler

from evodsp.config import FeatureConfig
from evodsp.data.dataset import ChainDataset, load_record
from evodsp.data.store import FeatureStore
from evodsp.data.templates.dates import parse_latest_date
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import UserError, nearest
from evodsp.training.config import DataConfig
from evodsp.training.loader import BatchStream, Check, StreamSampler, TrainingStream, whole_batches
from evodsp.training.strategy import DSPStrategy

MOST_CHAINS_READ = 64
"""Up to this many chains are read whole before training starts; of more, only their files' presence is checked."""


def chain_list(chains: str | list[str]) -> list[str]:
    """The names in a list of chains: the list itself, or a text file with one name per line ('#' begins a comment).

    Raises UserError if the file is missing or lists nothing, or a name comes twice.
    """
    source, names = "the list of chains", chains
    if isinstance(chains, str):
        source, path = chains, Path(chains)
        if not path.is_file():
            raise UserError(
                f"{chains}: no such file of chain names; write one name per line, or give a list [102m_A, ...]"
            )
        names = [name for line in path.read_text().splitlines() if (name := line.partition("#")[0].strip())]
    if not names:
        raise UserError(f"{source}: no chain names in it; write one per line")
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise UserError(f"{source}: '{twice[0]}' is listed more than once; remove the repetition")
    return list(names)


class ChainDataModule(LightningDataModule):
    """Training, validation and test chains, their features and batches.

    `check` finds what is wrong with folders and names before anything is written; `setup` calls it too.
    """

    def __init__(self, config: DataConfig, seed: int = 0) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        self.store: FeatureStore | None = None
        self.templates: TemplateSource | None = None
        self._samples_taken = 0
        self._training: TrainingStream | None = None

    def check(self) -> None:
        """Open the store and look every chain up. Raises UserError, in one line, for the first thing that is missing."""
        config = self.config
        for name in ("alignment_dir", "structure_dir"):
            if not Path(getattr(config, name)).is_dir():
                raise UserError(
                    f"data.{name} is {getattr(config, name)}, which is not a folder; give the one that holds them"
                )
        self.templates = _template_source(config)
        self.store = store = FeatureStore(Path(config.alignment_dir), Path(config.structure_dir))
        known = list(store.keys())
        self.train_chains = chain_list(config.train_chains) if config.train_chains is not None else known
        self.validation_chains = chain_list(config.validation_chains) if config.validation_chains is not None else []
        self.test_chains = chain_list(config.test_chains) if config.test_chains is not None else self.validation_chains
        if not self.train_chains:
            raise UserError(f"{config.alignment_dir}: no chains with alignments in it; give another data.alignment_dir")
        names = {
            "data.train_chains": self.train_chains,
            "data.validation_chains": self.validation_chains,
            "data.test_chains": self.test_chains,
        }
        for source, keys in names.items():
            for key in keys:
                _check_chain(key, known, store, source)
        every = dict.fromkeys(key for keys in names.values() for key in keys)
        if len(every) <= MOST_CHAINS_READ:
            for key in every:
                record = load_record(store, key, self.templates)
                if record.templates is not None:
                    _report(f"templates of {record.templates.log_line}")

    def setup(self, stage: str | None = None) -> None:
        if self.store is None:
            self.check()

    def train_dataloader(self) -> TrainingStream:
        config, ranks, rank, accumulate = self.config, self._ranks, self._rank, self._accumulate
        batches = whole_batches(config.samples_per_epoch, config.batch_size, ranks, accumulate)
        group = config.batch_size * ranks * accumulate  # one optimizer step runs one number of recycling iterations
        samples = self._samples(self.train_chains, config.train, training=True, group=group)
        sampler = StreamSampler(config.batch_size, batches, rank, ranks)
        # Back to the last whole step: of a step that was interrupted no gradient is kept.
        sampler.samples = self._samples_taken - self._samples_taken % group
        self._training = TrainingStream(samples, sampler, config.num_workers, self._check)
        return self._training

    def val_dataloader(self) -> Iterable[Any]:
        return self._whole_chains(self.validation_chains)

    def test_dataloader(self) -> Iterable[Any]:
        return self._whole_chains(self.test_chains)

    def state_dict(self) -> dict[str, Any]:
        """Lightning restores its loaders' state only inside an epoch; this one holds at the seams too."""
        return {"samples": self._training.indices.samples if self._training else self._samples_taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples_taken = state_dict["samples"]

    def _samples(self, keys: list[str], config: FeatureConfig, training: bool, group: int = 1) -> ChainDataset:
        if self.store is None:
            raise RuntimeError("call setup() before asking for batches")
        return ChainDataset(self.store, keys, config, self.seed, training, group, templates=self.templates)

    def _whole_chains(self, keys: list[str]) -> Iterable[Any]:
        """One chain a batch, each data rank its share; no batches without chains.

        Shares are equally long, or ranks would wait for those that still have batches: the first chains fill them up.
        """
        if not keys:
            return []
        most = math.ceil(len(keys) / self._ranks)
        share = [index % len(keys) for index in range(self._rank, most * self._ranks, self._ranks)]
        batches: Sampler[list[int]] = BatchSampler(share, batch_size=1, drop_last=False)
        samples = self._samples(keys, self.config.validation, training=False)
        return BatchStream(samples, batches, min(1, self.config.num_workers), self._check)

    @property
    def _strategy(self) -> DSPStrategy | None:
        """The strategy of several ranks; None for one process."""
        strategy = self.trainer.strategy if self.trainer else None
        return strategy if isinstance(strategy, DSPStrategy) else None

    @property
    def _check(self) -> Check | None:
        return self._strategy.agreement.check if self._strategy else None

    @property
    def _ranks(self) -> int:
        """Data ranks: how many samples are worked on at once. All ranks of a sequence group read the same one."""
        return self._strategy.mesh.data if self._strategy else 1

    @property
    def _rank(self) -> int:
        return self._strategy.mesh.data_rank if self._strategy else 0

    @property
    def _accumulate(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer else 1


def _template_source(config: DataConfig) -> TemplateSource | None:
    """Where templates come from, None where the settings name no folder of them. Raises UserError, naming the setting."""
    folder, latest, obsolete = config.template_structure_dir, config.max_template_date, config.obsolete
    if folder is None:
        for name, value in (("max_template_date", latest), ("obsolete", obsolete)):
            if value is not None:
                raise UserError(
                    f"data.{name} is {value}, but data.template_structure_dir is null; give it, or leave {name} out"
                )
        return None
    if not (config.train.max_templates or config.validation.max_templates):
        raise UserError(
            f"data.template_structure_dir is {folder}, but data.train.max_templates and data.validation.max_templates are 0; "
            "set them (AlphaFold2: 4), or leave the folder out"
        )
    if not Path(folder).is_dir():
        raise UserError(
            f"data.template_structure_dir is {folder}, which is not a folder; give the one that holds <pdbid>.cif"
        )
    if obsolete is not None and not Path(obsolete).is_file():
        raise UserError(
            f"data.obsolete is {obsolete}, which is not a file; download the PDB's obsolete.dat, or leave it out"
        )
    return TemplateSource.open(folder, parse_latest_date("data.max_template_date", latest), obsolete)


@rank_zero_only
def _report(line: str) -> None:
    print(line, file=sys.stderr)


def _check_chain(key: str, known: list[str], store: FeatureStore, source: str) -> None:
    if key not in known:
        raise UserError(f"{source}: no alignments of chain '{key}' in {store.alignment_dir}.{nearest(key, known)}")
    if not store.has_structure(key):
        raise UserError(
            f"{source}: no structure of chain '{key}' in {store.structure_dir}; add it or leave the chain out"
        )
