"""Samples whose loss or gradient is not finite: left out of their step, named, counted, and written to be computed again alone.

`evodsp.training.gradients` keeps them from the parameters; the module finds out which they are. All ranks know the same list.
A run that meets more than its limit stops between two steps, with a checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from evodsp.errors import UserError
from evodsp.files import write_json_lines
from evodsp.parallel.dtensor import gather_tree, local
from evodsp.printing import counted, logger
from evodsp.training.loader import TrainingLoader
from evodsp.training.replay import write_replay
from evodsp.training.run_folder import RunFolder

if TYPE_CHECKING:
    from evodsp.training.module import TrainingModule

_log = logger(__name__)

_DERIVED = ("loss", "total", "lddt_ca")
"""Logged numbers that are no term of the loss; they are named only if all terms are finite."""
_NAMED = 5
"""The number of parameters that a message names."""


@dataclass(frozen=True)
class Suspect:
    """A sample that one rank suspects, and its reasons."""

    sample: int
    numbers: Sequence[str] = ()
    """The logged numbers that are not finite."""
    parameters: Sequence[str] = ()
    """The parameters whose gradient is not finite."""
    one_of: int = 1
    """The number of samples among which one is bad."""


@dataclass(frozen=True)
class BadSample:
    """A sample that was left out, as `bad_samples.jsonl` lists it."""

    sample: int
    """Global index."""
    chain: str
    step: int
    """Optimizer step, from 0."""
    terms: list[str] = field(default_factory=list)
    """Terms of the loss that are not finite; `total` if only their sum is not."""
    parameters: list[str] = field(default_factory=list)
    """Parameters whose gradient is not finite, where it is known of this sample."""
    one_of: int = 1
    """The number of samples among which one must be bad: more than 1 where gradients are averaged before anyone could tell them
    apart."""
    time: str = ""
    """ISO 8601 in UTC."""

    def __str__(self) -> str:
        more = f" and {len(self.parameters) - _NAMED} more" if len(self.parameters) > _NAMED else ""
        parts = [f"loss {', '.join(self.terms)}"] if self.terms else []
        parts += [f"gradient of {', '.join(self.parameters[:_NAMED])}{more}"] if self.parameters else []
        doubt = f", or another one of {self.one_of} samples" if self.one_of > 1 else ""
        return f"sample {self.sample} (chain {self.chain}): {'; '.join(parts) or 'gradient'}{doubt}"


class TooManyBadSamplesError(UserError):
    """More samples were not finite than `max_bad_samples` allows."""


class NotFiniteWeightsError(UserError):
    """The weights themselves are not finite, and are not saved."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"the weights are not finite at step {step}, so they are not saved; go on from the last checkpoint with "
            "--ckpt_path last and a lower model.optimizer.lr"
        )


def all_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether all of this rank's numbers are finite. The host waits for the device."""
    with torch.no_grad():
        return bool(torch.stack(torch._foreach_norm([local(p) for p in parameters])).isfinite().all())


def merged(
    parts: Sequence[tuple[Sequence[Suspect], Sequence[int], Sequence[str]]], skip: Collection[int]
) -> list[Suspect]:
    """The suspects of all ranks in one step, one entry a sample. `parts`: for each rank its suspects, all samples of its step,
    and the parameters whose gradient is not finite after the mean over ranks.

    If no rank saw anything before that, every sample of the step is suspected, unless one of `skip` explains it.
    """
    found: dict[int, Suspect] = {}
    for suspect in (suspect for suspects, _, _ in parts for suspect in suspects):
        former = found.get(suspect.sample, suspect)
        numbers = dict.fromkeys([*former.numbers, *suspect.numbers])
        parameters = dict.fromkeys([*former.parameters, *suspect.parameters])
        found[suspect.sample] = Suspect(suspect.sample, list(numbers), list(parameters))
    samples = {sample for _, own, _ in parts for sample in own}
    if not found and not samples & set(skip):
        names = list(dict.fromkeys(name for _, _, parameters in parts for name in parameters))
        found = {sample: Suspect(sample, (), names, len(samples)) for sample in samples}
    return [found[sample] for sample in sorted(found.keys() - set(skip))]


class BadSamples(Callback):
    """The samples that this run left out, equal on all ranks.

    `limit`: the most samples that may be left out before the run stops. `replays`: the number of samples that are written to
    files, which `evodsp replay` computes again. `skip`: samples that are left out by the user's wish; they are neither named
    nor counted.
    """

    def __init__(self, limit: int = 10, replays: int = 0, skip: Collection[int] = ()) -> None:
        self.limit, self.replays, self.skip = limit, replays, frozenset(skip)
        self.folder: RunFolder | None = None
        """The folder of the run, on the rank that writes files."""
        self.samples: list[BadSample] = []
        self.kept = False
        """Whether some step of this run kept a sample."""

    def skips(self, samples: Iterable[int]) -> bool:
        """Whether one of these samples is to be left out."""
        return not self.skip.isdisjoint(samples)

    def add(self, suspects: Sequence[Suspect], module: TrainingModule) -> None:
        """Name the suspects of this step, before the optimizer changes the weights. All ranks call this with the same ones."""
        trainer, now = module.trainer, datetime.now(UTC).isoformat(timespec="seconds")
        loader = trainer.train_dataloader
        for suspect in suspects:
            terms = [name for name in suspect.numbers if name not in _DERIVED]
            if not terms and {"loss", "total"} & set(suspect.numbers):
                terms = ["total"]
            # Empty if the trainer's data are not evodsp's.
            chain = loader.chain_of(suspect.sample) if isinstance(loader, TrainingLoader) else ""
            parameters = list(suspect.parameters)
            bad = BadSample(suspect.sample, chain, trainer.global_step, terms, parameters, suspect.one_of, now)
            self.samples.append(bad)
            if trainer.is_global_zero:
                _log.warning("%s is not finite, and is left out of step %d", bad, bad.step)
            if len(self.samples) <= self.replays:
                self._write_replay(bad, module)
        self._write()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Stop between two steps, so that a checkpoint of this one can be written."""
        if self.number > self.limit:
            listed = f"; {self.path} lists them" if self.path is not None else ""
            raise TooManyBadSamplesError(
                f"{counted(self.number, 'sample')} {'was' if self.number == 1 else 'were'} not finite, the last "
                f"{self.samples[-1]}, but max_bad_samples is {self.limit}"
                f"{listed}; 'evodsp replay FILE' computes one again alone; go on with --ckpt_path last and a lower "
                "model.optimizer.lr, a larger --max_bad_samples, or these samples in data.skip_samples"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that has learned nothing is not a finished one, however short it is."""
        if self.samples and not self.kept:
            raise TooManyBadSamplesError(
                f"no sample of this run was finite, the last {self.samples[-1]}; {self.path or 'the log'} lists them; check "
                "model.loss, and lower model.optimizer.lr"
            )

    @property
    def number(self) -> int:
        """The number of samples that were not finite. Samples of a step that cannot be told apart count as one."""
        return sum(bad.one_of == 1 for bad in self.samples) + len({bad.step for bad in self.samples if bad.one_of > 1})

    @property
    def path(self) -> Path | None:
        """The list of these samples, one JSON object a line."""
        return None if self.folder is None else self.folder.bad_samples

    def state_dict(self) -> dict[str, Any]:
        return {"samples": [dataclasses.asdict(bad) for bad in self.samples]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Samples that the user skips from now on do not count any more."""
        found = [BadSample(**entry) for entry in state_dict["samples"]]
        self.samples = [bad for bad in found if bad.sample not in self.skip]
        self._write()

    def _write(self) -> None:
        write_json_lines(self.path, self.samples)

    def _write_replay(self, bad: BadSample, module: TrainingModule) -> None:
        weights = gather_tree(module.state_dict(), keep=self.folder is not None)  # a collective
        loader = module.trainer.train_dataloader
        if self.folder is None or not isinstance(loader, TrainingLoader):
            return
        path = self.folder.replays / f"sample_{bad.sample}.pt"
        try:
            batch = loader.again(bad.sample)
            write_replay(path, module, weights, batch, str(bad))
        except (UserError, OSError) as error:  # the run is worth more than the file
            _log.warning("%s is not written: %s", path, error)
        else:
            _log.warning("compute it again alone with: evodsp replay %s", path)
