"""Loaders of batches. The training loader yields an endless sequence of samples, divided into epochs, and can be resumed.

Samples are addressed by global index; the state of a run is how many of them all ranks together have taken, and which chains
are left out from which sample on. A run that stops in the middle of an epoch therefore
resumes with the next sample, on any number of ranks with the same global batch.

Samples are requested ahead, made out of order (`data.samples.dataset`) and handed over in order. One rank of a sequence
group reads; on the others a batch is a list of sample numbers, until the reading rank shares the rest (`World.share`). Ranks
learn of each other's failures once per optimizer step, before they compute any of it; a rank that holds a sample of a chain
that failed elsewhere takes another sample.

The quarantine holds the chains that a run leaves out, because they could not be read, took too long or killed the process
that read them. A run must not end because of a bad chain, and leaving one out must not change the others. So a chain is left
out from the sample on at which it failed: sample j takes another chain in its place if, and only if, the chain failed at a
sample i <= j. The list is therefore a function of the samples, not of the time at which a rank or a worker learned of a
failure, and a run that resumes before sample i takes the same samples again, whether the failure can be repeated (a broken
file) or not (a time limit, a killed worker).
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from evodsp.data.samples.dataset import Sample, SampleDataset, SampleMaker, collate
from evodsp.errors import FileFormatError, MachineError, UserError
from evodsp.features.batch import with_features
from evodsp.files import write_json_lines
from evodsp.printing import counted, logger
from evodsp.reading.text_files import check_text

_log = logger(__name__)


@dataclass(frozen=True)
class FailedChain:
    """A chain that could not be made into a sample, and the reason."""

    chain: str
    sample: int
    """Global index of the sample; the chain is left out from it on."""
    reason: str
    """One line."""
    time: str = ""
    """Time at which the run learned of it, ISO 8601 in UTC."""


class QuarantineFull(UserError):
    """More chains failed than `data.max_quarantined` allows."""


class Quarantine:
    """The chains that a run leaves out, equal on all ranks. `limit`: the most chains that may be left out before the run stops.

    If `path` is given (on one rank), every change is written to that file before a batch is made of other chains: one JSON
    object per line, in the order of the samples.
    """

    def __init__(self, limit: int, path: Path | None = None) -> None:
        self.limit, self.path = limit, path
        self._failures: dict[str, FailedChain] = {}

    def __len__(self) -> int:
        return len(self._failures)

    @property
    def room(self) -> int:
        """The number of chains that may still fail."""
        return max(0, self.limit - len(self))

    @property
    def failures(self) -> list[FailedChain]:
        """The failed chains, in the order of the samples."""
        return sorted(self._failures.values(), key=lambda failure: (failure.sample, failure.chain))

    def chains_at(self, sample: int) -> set[str]:
        """The chains that `sample` leaves out."""
        return {failure.chain for failure in self._failures.values() if failure.sample <= sample}

    def add(self, failures: Iterable[FailedChain]) -> None:
        """Leave out the chains of `failures`, the same on all ranks and in any order; each is named once, at its first sample.

        Raises QuarantineFull, after the file is written, if there are now more than `limit`.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        for failure in sorted(failures, key=lambda failure: (failure.sample, failure.chain, failure.reason)):
            known = self._failures.get(failure.chain)
            if known is None or failure.sample < known.sample:
                self._failures[failure.chain] = dataclasses.replace(failure, time=now)
                if self.path is not None:
                    _log.warning(
                        "chain %s is left out from sample %d on: %s", failure.chain, failure.sample, failure.reason
                    )
        self._write()
        self.check_limit()

    def check_limit(self) -> None:
        """Raise QuarantineFull if more than `limit` chains are left out."""
        if len(self) > self.limit:
            last = self.failures[-1]
            where = f"; {self.path} lists them" if self.path is not None else ""
            raise QuarantineFull(
                f"{counted(len(self), 'chain')} failed, the last {last.chain} ({last.reason}), but data.max_quarantined is "
                f"{self.limit}{where}; correct or remove these chains, or raise data.max_quarantined"
            )

    def state(self) -> list[dict[str, Any]]:
        """The list as a checkpoint stores it."""
        return [dataclasses.asdict(failure) for failure in self.failures]

    def restore(self, failures: Iterable[FailedChain]) -> None:
        """Replace the list, for a run that resumes. Raises QuarantineFull if it is longer than `limit`."""
        self._failures = {failure.chain: failure for failure in failures}
        self._write()
        self.check_limit()

    def _write(self) -> None:
        write_json_lines(self.path, self.failures)


def failures_of(state: Iterable[Mapping[str, Any]]) -> list[FailedChain]:
    """The inverse of `Quarantine.state`."""
    return [FailedChain(**entry) for entry in state]


def read_quarantine(path: Path) -> list[FailedChain] | None:
    """The list in a file that `Quarantine` wrote; None if there is no such file. A user may delete lines.

    Raises FileFormatError for a line that is no entry of such a list.
    """
    if not path.is_file():
        return None
    data = path.read_bytes()
    if not data.strip():
        return []
    failures = []
    for number, line in enumerate(check_text(path, data).decode().splitlines(), start=1):
        try:
            entry = json.loads(line)
            failure = FailedChain(**entry)
            if not (isinstance(failure.chain, str) and type(failure.sample) is int and failure.sample >= 0):
                raise ValueError
        except (ValueError, TypeError, RecursionError) as error:
            message = 'expected {"chain": name, "sample": number, "reason": …, "time": …}; delete the line'
            raise FileFormatError(path, message, number) from error
        failures.append(failure)
    return failures


Batch = dict[str, Tensor]
Check = Callable[[Sequence[Batch] | UserError, Sequence[FailedChain]], list[FailedChain]]
"""`World.check_batches`."""


class EpochSampler(Sampler[list[int]]):
    """Batches of global sample indices: data rank d of D takes the indices that are d modulo D.

    One iteration yields the rest of the epoch: all `len(self)` batches at its start, fewer after a resume.
    """

    def __init__(self, batch_size: int, batches: int, rank: int = 0, ranks: int = 1) -> None:
        self.batch_size, self.batches, self.rank, self.ranks = batch_size, batches, rank, ranks
        self.samples = 0
        """Samples that all ranks together have taken since the start of training."""
        self.samples_per_batch = batch_size * ranks
        """Samples of one batch on each of the data ranks, together."""

    def __len__(self) -> int:
        return self.batches

    def indices(self, batch: int) -> list[int]:
        """The samples of this rank's batch number `batch`, counted from the start of training."""
        first = batch * self.samples_per_batch + self.rank
        return list(range(first, first + self.samples_per_batch, self.ranks))

    def __iter__(self) -> Iterator[list[int]]:
        taken = self.samples // self.samples_per_batch
        for batch in range(taken, (taken // self.batches + 1) * self.batches):
            yield self.indices(batch)


@dataclass
class _Request:
    """A sample that was asked for. `failed`: the chains that could not be made into it, each with its reason; the ranks have
    not agreed on them yet."""

    key: str
    future: Future[Sample]
    failed: dict[str, str] = field(default_factory=dict)


class TrainingLoader:
    """An iterable of batches, as Lightning's Trainer takes for training.

    A sample whose chain fails is made of another chain, the same one on all ranks of a sequence group; the chain goes into the
    quarantine. Lightning calls `state_dict` and `load_state_dict` to resume in the middle of an epoch.
    """

    def __init__(
        self,
        samples: SampleDataset,
        sampler: EpochSampler,
        maker: SampleMaker | None,
        check: Check,
        quarantine: Quarantine,
        ahead: Callable[[int], int] = lambda sample_bytes: 0,
        accumulate: int = 1,
    ) -> None:
        """`maker`: the maker of samples, or None on a rank that reads nothing. `check`: `World.check_batches`. `ahead`: a
        function from the bytes of the largest sample so far (0 before the first) to the number of samples to request beyond the
        step. `accumulate`: the number of batches in a step.
        """
        self.samples, self.maker, self.check, self.quarantine, self._ahead = samples, maker, check, quarantine, ahead
        self.accumulate = accumulate
        self.indices = sampler  # not named `sampler`: Lightning treats an object with that attribute as a DataLoader
        self.waited_s = 0.0
        """Seconds that the run has waited here for samples, its own and those of other ranks."""
        self._requests: dict[int, _Request] = {}
        self._largest = 0

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Batch]:
        left = iter(self.indices)
        while step := list(islice(left, self.accumulate)):
            begun = time.perf_counter()
            batches = self._agreed(step)
            self._request_ahead(self.indices.samples // self.indices.samples_per_batch + len(step))
            self.waited_s += time.perf_counter() - begun
            while batches:
                self.indices.samples += self.indices.samples_per_batch
                yield batches.pop(0)

    def chain_of(self, index: int) -> str:
        """The chain that sample `index` was made of."""
        return self.samples.key_of(index, self.quarantine.chains_at(index))

    def again(self, index: int) -> Batch:
        """The features of sample `index` alone, made anew in this process.

        Raises UserError if its chain cannot be read any more.
        """
        sample = self.samples.make(index, self.chain_of(index))
        return with_features(collate([{**sample, "sample_index": torch.tensor(index)}]), self.samples.config)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.indices.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.indices.samples = state["samples"]

    def _agreed(self, step: list[list[int]]) -> list[Batch]:
        """The batches of a step, given their samples, once no rank has met a chain that it could not read."""
        for index in [index for index in self._requests if index < step[0][0]]:
            self._requests.pop(index).future.cancel()
        while True:
            batches, failed = self._made(step)
            met = self.check(batches, failed)
            if not met:
                for indices in step:
                    for index in indices:
                        self._requests.pop(index, None)
                read = isinstance(batches, list) and batches
                return read or [sample_numbers(indices) for indices in step]
            self.quarantine.add(met)
            known = {failure.chain for failure in met}
            for request in self._requests.values():
                request.failed = {chain: reason for chain, reason in request.failed.items() if chain not in known}

    def _made(self, step: list[list[int]]) -> tuple[list[Batch] | UserError, list[FailedChain]]:
        """The batches of this rank, and the failures that it met on the way; with failures there are no batches yet."""
        if (maker := self.maker) is None:
            return [], []
        indices = [index for batch in step for index in batch]
        try:
            for index in indices:
                self._request(index, maker)
            samples = {index: self._finished(index, maker) for index in indices}
        except UserError as error:  # no chain is left: every rank must hear of it
            reasons = [failure.reason for failure in self.quarantine.failures]
            reasons += [reason for request in self._requests.values() for reason in request.failed.values()]
            return UserError(f"{error}; the last one: {reasons[-1]}") if reasons else error, []
        failed = [
            FailedChain(chain, index, reason)
            for index in indices
            for chain, reason in self._requests[index].failed.items()
        ]
        if failed:
            return [], failed
        return [collate([s for index in batch if (s := samples[index]) is not None]) for batch in step], []

    def _request(self, index: int, maker: SampleMaker) -> _Request:
        """Ask for sample `index`, again if its chain was left out meanwhile or could not be read."""
        left_out = self._left_out(index)
        request = self._requests.get(index)
        if request is None:
            key = self.samples.key_of(index, left_out)
            request = self._requests[index] = _Request(key, maker.submit(index, key))
        while True:
            if request.future.done() and (error := request.future.exception()) is not None:
                if not isinstance(error, UserError) or isinstance(error, MachineError):
                    raise error  # neither a bug nor a full machine must pass for a bad chain
                request.failed[request.key] = str(error)
                if len(request.failed) > self.quarantine.room:
                    return request  # the run is about to end: do not try every chain of a disk that is gone
            elif request.key not in left_out:
                return request
            request.future.cancel()
            request.key = self.samples.key_of(index, left_out | request.failed.keys())
            request.future = maker.submit(index, request.key)

    def _left_out(self, index: int) -> set[str]:
        """The chains that sample `index` will leave out: those in the quarantine, and those that failed at a sample before it,
        which will be there when `index` is handed over. So a chain that kills its worker does that once, however often it
        is drawn among the samples that are made ahead.
        """
        earlier = (request.failed for sample, request in self._requests.items() if sample < index)
        return self.quarantine.chains_at(index).union(*earlier)

    def _finished(self, index: int, maker: SampleMaker) -> Sample | None:
        """Wait for sample `index`, of whichever chain can be read; None if more chains fail than there is room for."""
        request = self._requests[index]
        while request.future.exception() is not None:
            self._request(index, maker)
            if len(request.failed) > self.quarantine.room:
                return None
        sample = request.future.result()
        self._largest = max(self._largest, sum(value.nbytes for value in sample.values()))
        return {**sample, "sample_index": torch.tensor(index)}

    def _request_ahead(self, batch: int) -> None:
        """Ask for samples from batch number `batch` on, beyond the end of the epoch too."""
        if (maker := self.maker) is None:
            return
        for number in range(batch, batch + math.ceil(self._ahead(self._largest) / self.indices.batch_size)):
            for index in self.indices.indices(number):
                self._request(index, maker)


def sample_numbers(indices: Sequence[int]) -> Batch:
    """A batch on a rank that reads nothing."""
    return {"sample_index": torch.tensor(indices)}


class WholeChainLoader:
    """An iterable of batches of one chain each, for validation.

    A chain that cannot be scored is an error, or, with `leave_out`, is reported and left out of this validation.
    """

    def __init__(
        self, samples: SampleDataset, share: Sequence[int], maker: SampleMaker | None, check: Check, leave_out: bool
    ) -> None:
        """`share`: the samples of this data rank; all shares have one length. `maker`: None on a rank that reads nothing."""
        self.samples, self.share, self.maker, self.check, self.leave_out = samples, share, maker, check, leave_out

    def __len__(self) -> int:
        return len(self.share)

    def __iter__(self) -> Iterator[Batch]:
        left_out: dict[str, str] = {}
        for index, found in zip(self.share, self._batches(), strict=True):
            if not self.leave_out:
                self.check(found, ())
            elif failures := self._failures(found, index):
                left_out |= {failure.chain: failure.reason for failure in failures}
                if any(failure.sample == index for failure in failures):
                    self.check([], ())
                    continue
                self.check(found, ())
            yield found[0] if isinstance(found, list) and found else sample_numbers([index])
        for chain, reason in left_out.items():
            _log.warning("chain %s is left out of this validation: %s", chain, reason)
        if len(left_out) == len(self.samples):
            raise UserError(f"no validation chain can be read, the last one because: {reason}")

    def _batches(self) -> Iterator[list[Batch] | UserError]:
        """This rank's batches, as `Check` takes them: one, an error if its file is wrong, and none on a rank that reads
        nothing."""
        if self.maker is None:
            yield from [[]] * len(self.share)
            return
        requests: list[Future[Sample]] = []
        for place, index in enumerate(self.share):
            requests += [self.maker.submit(i, self.samples.key_of(i)) for i in self.share[len(requests) : place + 2]]
            try:
                yield [collate([{**requests[place].result(), "sample_index": torch.tensor(index)}])]
            except MachineError:
                raise
            except UserError as error:
                yield error
            requests[place] = Future()  # drops the sample

    def _failures(self, found: list[Batch] | UserError, index: int) -> list[FailedChain]:
        """The failed chains of all ranks, for one batch of each."""
        if isinstance(found, UserError):
            return self.check([], [FailedChain(self.samples.key_of(index), index, str(found))])
        return self.check(found, ())
