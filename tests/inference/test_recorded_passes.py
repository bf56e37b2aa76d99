"""Whole passes that are recorded and replayed (`evodsp.inference.seeds.PassRunner`), with a recorder that computes again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.config import as_multimer
from evodsp.inference import seeds
from evodsp.inference.config import PassSettings
from evodsp.inference.predict import predict_records
from evodsp.inference.seeds import PassRunner, run_passes
from evodsp.model.alphafold import AlphaFold
from evodsp.model.heads import ModelOutput
from evodsp.model.recordings import Rerun, Taken
from tests.builders.parameters import noisy
from tests.builders.prediction import silent
from tests.builders.small_model import config

from .conftest import Workplace

Batch = dict[str, Tensor]
CYCLES = 4


class Silent(Rerun):
    """Repeats without operators that are counted, as a graph does. Counts what is freed."""

    def __init__(self) -> None:
        self.freed = self.recorded = 0
        self.replaying = False

    def record(self, run: Any, pool: Any) -> Taken:
        taken = super().record(run, pool)
        self.recorded += 1

        def repeat() -> None:
            self.replaying = True
            try:
                taken.repeat()
            finally:
                self.replaying = False

        def free() -> None:
            self.freed += 1

        return Taken(taken.results, repeat, free)


class Operators(TorchDispatchMode):
    """Counts operators that a host would launch outside of replays."""

    def __init__(self, recorder: Silent) -> None:
        super().__init__()
        self.recorder, self.count = recorder, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
        self.count += not self.recorder.replaying and not views and "empty" not in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Silent:
    found = Silent()
    monkeypatch.setattr(seeds, "recorder_of", lambda _: found)
    return found


def model_of(multimer: bool = False) -> AlphaFold:
    torch.manual_seed(0)
    made = config(recompute=False)
    return noisy(AlphaFold(as_multimer(made) if multimer else made)).eval()


def batch_of(residues: int, rows: int, extra: int, seed: int = 0, multimer: bool = False) -> Batch:
    """Features of one chain in single precision, of `CYCLES` sets."""
    torch.manual_seed(seed)
    r, s, e, t = residues, rows, extra, 2

    def letters(count: int, *shape: int) -> Tensor:
        return torch.randint(count, (1, CYCLES, *shape)).int()

    def same(x: Tensor) -> Tensor:
        return x[:, :1].expand(-1, CYCLES, *x.shape[2:])

    real = torch.randn
    batch = {
        "aatype": same(letters(20, r)), "residue_index": same(torch.arange(r).int().expand(1, CYCLES, r)),
        "seq_mask": same(torch.ones(1, CYCLES, r)), "target_feat": same(real(1, CYCLES, r, 21 if multimer else 22)),
        "msa_feat": real(1, CYCLES, s, r, 49), "msa_mask": torch.ones(1, CYCLES, s, r),
        "extra_msa": letters(23, e, r), "extra_msa_mask": torch.ones(1, CYCLES, e, r),
        "extra_has_deletion": real(1, CYCLES, e, r).sign().clamp(min=0), "extra_deletion_value": real(1, CYCLES, e, r),
        "template_aatype": same(letters(22, t, r)),
        "template_all_atom_positions": same(10 * real(1, CYCLES, t, r, 37, 3)),
        "template_all_atom_masks": same(torch.ones(1, CYCLES, t, r, 37)),
        "template_pseudo_beta": same(10 * real(1, CYCLES, t, r, 3)),
        "template_pseudo_beta_mask": same(torch.ones(1, CYCLES, t, r)), "template_mask": same(torch.ones(1, CYCLES, t)),
    }  # fmt: skip
    for name in ("asym_id", "entity_id", "sym_id"):
        batch[name] = same((1 + (torch.arange(r) >= r // 2).int()).expand(1, CYCLES, r))
    return batch


def run(runner: PassRunner, batch: Batch) -> ModelOutput:
    output, _ = run_passes(runner, runner.sized(batch), lambda _: None)
    assert not runner.given_up
    return output


def launched(model: AlphaFold, batch: Batch) -> ModelOutput:
    return run(PassRunner(model, PassSettings(cuda_graphs=False)), batch)


def positions(output: ModelOutput, residues: int) -> Tensor:
    return output.structure.positions[:, :residues]


PIECES = 1 << 12
"""Working memory in which layers compute a row at a time."""


@pytest.mark.verify_but("True-fp32-None")
@pytest.mark.parametrize(
    ("multimer", "precision", "memory"),
    [
        (False, "fp32", None),
        (True, "fp32", None),
        (True, "bf16", None),
        (True, "bf16", PIECES),
        (False, "bf16", None),
        (False, "fp32", PIECES),
        (True, "fp32", PIECES),
        (False, "bf16", PIECES),
    ],
)
def test_replayed_passes_are_the_passes(recorder: Silent, multimer: bool, precision: Any, memory: int | None) -> None:
    """Catches features or recycled inputs of an earlier pass, casts at other addresses, and a pass in place that overwrites the
    inputs of its recording."""
    model = model_of(multimer)
    runner, usual = (PassRunner(model, PassSettings(precision, cuda_graphs=graphs)) for graphs in (True, False))
    runner.memory = usual.memory = memory
    for seed in range(2):
        batch = batch_of(14, 6, 8, seed, multimer)  # the sizes of a bucket
        found = run(runner, batch)
        expected = run(usual, batch)
        assert torch.equal(found.structure.positions, expected.structure.positions)
        for name, x in expected.logits.items():
            assert torch.equal(found.logits[name], x), name
    assert recorder.recorded == 1


def test_a_replay_drops_what_its_seed_drops(recorder: Silent) -> None:
    """Catches dropout of the first seed in the recording, which all others would repeat."""
    model, batch, found = model_of(False), batch_of(14, 6, 8, 0, False), []
    runner, usual = (PassRunner(model, PassSettings(cuda_graphs=graphs, dropout=True)) for graphs in (True, False))
    for seed in range(2):
        found.append(run_passes(runner, runner.sized(batch), lambda _: None, seed)[0].structure.positions.clone())
        expected, _ = run_passes(usual, usual.sized(batch), lambda _: None, seed)
        assert torch.equal(found[seed], expected.structure.positions)
    assert not torch.equal(*found)
    assert recorder.recorded == 1


@pytest.mark.verify
@pytest.mark.parametrize("multimer", [False, True])
def test_early_stopping_and_ensembles(recorder: Silent, multimer: bool) -> None:
    """Catches a change of distances that padding adds to, a pass too many or too few, and feature sets of another pass."""
    model, one = model_of(multimer), batch_of(25, 6, 8, 3, multimer)
    two = {name: torch.cat((x, x.flip(1)), 1) if x.stride(1) else x[:, :1].expand(-1, 2 * CYCLES, *x.shape[2:])
           for name, x in one.items()}  # fmt: skip
    cases: list[tuple[Batch, dict[str, Any]]] = [
        (one, {"stop_tolerance": 1e9}),
        (one, {"stop_tolerance": 1e-9}),
        (two, {"ensembles": 2}),
    ]
    counts = []
    for batch, options in cases:
        runner, usual = (PassRunner(model, PassSettings(cuda_graphs=graphs, **options)) for graphs in (True, False))
        found, seconds = run_passes(runner, runner.sized(batch), lambda _: None)
        expected, as_usual = run_passes(usual, usual.sized(batch), lambda _: None)
        assert not runner.given_up
        assert len(seconds) == len(as_usual)
        counts.append(len(seconds))
        off = (positions(found, 25) - positions(expected, 25)).abs().max()
        assert float(off / positions(expected, 25).abs().max()) < 1e-6
        if found.ca_change is not None and expected.ca_change is not None:
            torch.testing.assert_close(found.ca_change, expected.ca_change, rtol=1e-5, atol=0)
    assert counts == [3 if multimer else 2, CYCLES, CYCLES]
    assert recorder.recorded == len(cases)


@pytest.mark.verify_but("True")
@pytest.mark.parametrize("multimer", [False, True])
def test_padding_moves_no_atom(recorder: Silent, multimer: bool) -> None:
    """Catches padding that somebody sees, and numbers of a longer protein that stay for a shorter one."""
    model = model_of(multimer)
    runner = PassRunner(model, PassSettings())
    long, short = batch_of(28, 7, 16, 1, multimer), batch_of(25, 7, 15, 2, multimer)
    long["msa_feat"][:] = torch.nan
    assert positions(run(runner, long), 28).isnan().any()
    found, expected = run(runner, short), launched(model, short)
    assert recorder.recorded == 1
    assert found.structure.positions.shape[1] == 28
    off = (positions(found, 25) - expected.structure.positions).abs().max()
    assert float(off / expected.structure.positions.abs().max()) < 1e-6
    assert torch.equal(found.structure.mask[:, :25], expected.structure.mask)


def test_the_host_launches_few_operators(recorder: Silent) -> None:
    """Catches passes that the host launches: the second to fourth, and each one of a second protein of these sizes."""
    runner = PassRunner(model_of(), PassSettings())
    ends: list[int] = []
    for seed, residues in enumerate((28, 26)):
        batch = runner.sized(batch_of(residues, 6, 8, seed))
        with Operators(recorder) as operators:
            ends.append(operators.count)
            run_passes(runner, batch, lambda _: ends.append(operators.count))
    first, second = ends[: CYCLES + 1], ends[CYCLES + 1 :]
    counts = np.diff(first)[1:].tolist() + np.diff(second).tolist()
    assert recorder.recorded == 1
    assert max(counts) <= 60, counts


@pytest.mark.verify
def test_the_oldest_recording_goes(recorder: Silent) -> None:
    """Catches recordings that pile up, one that is in use and goes, and memory that stays for what is not recorded."""
    runner = PassRunner(model_of(), PassSettings())
    for residues in (10, 12, 14, 10, 16):
        run(runner, batch_of(residues, 4, 4))
    assert (recorder.recorded, recorder.freed) == (4, 1)
    run(runner, batch_of(9, 4, 4))  # as 10
    assert recorder.recorded == 4
    run(runner, {name: x[:, :2] for name, x in batch_of(9, 4, 4).items()})
    assert recorder.freed == 4


class Failing(Rerun):
    """Fails at the first recording but `good`."""

    def __init__(self, good: int = 0, error: type[Exception] = RuntimeError) -> None:
        self.good, self.error, self.begun = good, error, 0

    def record(self, run: Any, pool: Any) -> Taken:
        self.begun += 1
        if self.begun > self.good:
            raise self.error("operation not permitted")
        return super().record(run, pool)


@pytest.mark.verify
def test_a_protein_too_large_to_record_is_launched() -> None:
    """Catches a target that ends because the memory of a recording is not there, and numbers of the target before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seeds, "recorder_of", lambda _: failing)
        failing = Failing(1, torch.OutOfMemoryError)
        model = model_of()
        runner = PassRunner(model, PassSettings())
        for seed, residues in enumerate((14, 28, 14)):
            batch = batch_of(residues, 6, 8, seed)
            found, _ = run_passes(runner, runner.sized(batch), lambda _: None)
            expected, _ = run_passes(PassRunner(model, PassSettings(cuda_graphs=False)), batch, lambda _: None)
            assert torch.equal(found.structure.positions, expected.structure.positions)
            assert bool(runner.given_up) == (seed > 0)
    assert "OutOfMemoryError" in runner.given_up
    assert failing.begun == 2


@pytest.mark.verify
def test_what_cannot_be_recorded_is_launched(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a prediction that ends with its first recording, other numbers, and a line for each pass."""
    expected = predict_records(workplace.change(recycles=2), silent).results
    monkeypatch.setattr(seeds, "recorder_of", lambda _: Failing())
    lines: list[str] = []
    found = predict_records(workplace.change(recycles=2, overwrite=True), lines.append).results
    assert [result.mean_plddt for result in found] == [result.mean_plddt for result in expected]
    [line] = [line for line in lines if "CUDA graph" in line]
    assert "AlphaFold cannot be recorded as a CUDA graph: RuntimeError: operation not permitted" in line
    lines.clear()
    predict_records(workplace.change(recycles=2, overwrite=True, cuda_graphs=False), lines.append)
    assert not [line for line in lines if "CUDA graph" in line]
