"""What the models of each arrangement take of the targets. `ModelConfig.arrangement` chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evodsp.config import ArrangementName
from evodsp.errors import UserError
from evodsp.inference.target_msas import ChainMsa, ComplexMsa, TargetMsa
from evodsp.inference.targets import Target


@dataclass(frozen=True)
class TargetReader:
    """How targets become inputs of the models of an arrangement."""

    check: Callable[[Target, Path], None]
    """Raises UserError for a target that the model, of this file, does not take."""
    read: Callable[[Target], TargetMsa]
    """Reads the alignments of a target. Raises UserError if one is broken or of another sequence."""


def _check_single(target: Target, model: Path) -> None:
    if target.chains:
        raise UserError(
            f"{target.query.name}: a complex of {len(target.chains)} chains, but {model} is a model of single chains; give a "
            "multimer model (--weights model_1_multimer_v3, or --checkpoint), or each chain as a record of its own"
        )


def _take_all(target: Target, model: Path) -> None:
    """A single chain is a complex of one."""


READERS: dict[ArrangementName, TargetReader] = {
    "monomer": TargetReader(_check_single, ChainMsa.read),
    "multimer": TargetReader(_take_all, ComplexMsa.read),
}
