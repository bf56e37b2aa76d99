"""Samples of complexes: those of `evodsp.data.samples.dataset` with several chains in each.

Shapes: C chains in the order of the columns of the MSA, N residues of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evodsp.config import FeatureConfig
from evodsp.data.complexes.merging import MergedMsa, merge
from evodsp.data.complexes.source import ComplexFiles
from evodsp.data.records import Assembly
from evodsp.data.samples.complex_crop import complex_crop, contiguous_crop
from evodsp.data.samples.complex_features import complex_features
from evodsp.data.samples.crop import piece
from evodsp.data.samples.dataset import SCALAR_LABELS, Drawing, Record, RecordDataset, Sample, chain_labels, cropped
from evodsp.data.samples.sampling import ChainChoice
from evodsp.geometry.alphabet import encode_sequence
from evodsp.geometry.residues import CA


@dataclass(frozen=True)
class ComplexRecord:
    """The parsed data of a complex: its merged MSA, and the labels of all residues, chain after chain."""

    merged: MergedMsa
    lengths: tuple[int, ...]
    labels: dict[str, Tensor]

    @classmethod
    def of(cls, assembly: Assembly, merged: MergedMsa, assumed_resolution: float | None = None) -> ComplexRecord:
        """`merged`: of the chains of the assembly. `assumed_resolution`: see `load_record`."""
        chains = [assembly.chains[place] for place in merged.order()]
        labels = [chain_labels(chain, encode_sequence(chain.sequence), assumed_resolution) for chain in chains]
        joined = {name: torch.cat([own[name] for own in labels]) for name in labels[0] if name not in SCALAR_LABELS}
        return cls(merged, tuple(map(len, chains)), joined | {"resolution": labels[0]["resolution"]})

    @property
    def nbytes(self) -> int:
        msa = self.merged.msa.nbytes + self.merged.deletions.nbytes + self.merged.block.nbytes
        return msa + sum(label.nbytes for label in self.labels.values())

    def sample(self, drawing: Drawing) -> Sample:
        """A random crop, half of the time around an interface; in validation pieces of all chains, the same in every epoch."""
        config, draws, size = drawing.config, drawing.draws, drawing.config.crop_size
        total, clamped = sum(self.lengths), False
        if size is None or total <= size:
            crop = piece(0, total)
        elif drawing.training:
            positions, mask = (self.labels[f"all_atom_{name}"][:, CA].numpy() for name in ("positions", "mask"))
            crop = complex_crop(self.lengths, positions, mask, size, draws)
        else:
            crop = contiguous_crop(self.lengths, size, draws)
        if drawing.training:
            clamped = bool(draws.at("clamp").uniform(1)[0] < config.clamp_fape_fraction)
        features = complex_features(self.merged, config, draws, drawing.cycles, crop)
        sample = {name: torch.from_numpy(values) for name, values in features.items()}
        return sample | cropped(self.labels, crop, size or total) | {"use_clamped_fape": torch.tensor(float(clamped))}


class ComplexDataset(RecordDataset):
    """Samples of complexes. A key is an entry, whose assembly the source reads. `assumed_resolution`: see `load_record`.

    Labels of copies of a chain are in the order of the file; `evodsp.losses.permutation` finds the one that fits a prediction.
    Templates are not read: all that `max_templates` asks for are absent.
    """

    def __init__(
        self,
        source: ComplexFiles,
        keys: Sequence[str],
        config: FeatureConfig,
        seed: int,
        training: bool,
        batch_group: int = 1,
        cache_bytes: int = 1 << 30,
        choice: ChainChoice | None = None,
        assumed_resolution: float | None = None,
    ) -> None:
        super().__init__(keys, config, seed, training, batch_group, cache_bytes, choice)
        self.source, self.assumed_resolution = source, assumed_resolution

    def _load(self, key: str) -> Record:
        parsed = self.source.parsed(key)
        return ComplexRecord.of(parsed.assembly, merge(parsed.chains), self.assumed_resolution)
