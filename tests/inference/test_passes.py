"""The passes of a model: ensembles, early stopping, dropout, casts, clocks; and passes that are recorded and replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.config import HeadsConfig, LayerPrecision, ModelConfig, as_multimer, computes_in_half
from evodsp.data.formats.mmcif import read_chain
from evodsp.data.records import ProteinSequence
from evodsp.data.samples.dataset import collate
from evodsp.data.sources.layout import read_alignment_dir
from evodsp.errors import UserError
from evodsp.features.batch import prediction_sample
from evodsp.inference import seeds
from evodsp.inference.config import PassSettings, PredictConfig
from evodsp.inference.predict import predict, predict_records
from evodsp.inference.seeds import PassClock, PassRunner, run_passes, structure_of
from evodsp.inference.structure_files import PredictedStructure
from evodsp.inference.targets import Target
from evodsp.model.alphafold import AlphaFold, settled
from evodsp.model.heads import ModelOutput, StructureOutput
from evodsp.model.recordings import Rerun, Taken
from evodsp.parallel.exchange import LocalExchange
from evodsp.weights.checkpoint import load_model
from tests.builders.parameters import noisy
from tests.builders.prediction import read_json, silent
from tests.builders.small_model import config

from .conftest import QUERY, TRAINED, Finished, Workplace


def by_hand(workplace: Workplace, recycles: int, ensembles: int, samples: int = 1, **options: float) -> ModelOutput:
    """Run the model directly on features of alpha_A, seed 0, with the fixture's sizes.

    `samples`: equal samples in the batch.
    """
    query = ProteinSequence("alpha_A", QUERY)
    config = replace(TRAINED, crop_size=None, msa_clusters=5, extra_msa=4, recycles=recycles)
    sample = prediction_sample(
        query, read_alignment_dir(workplace.config.alignments / "alpha_A", query), config, 0, ensembles=ensembles
    )
    assert len(sample["aatype"]) == (recycles + 1) * ensembles
    with torch.no_grad():
        return load_model(workplace.config.checkpoint)(collate([sample] * samples), ensembles=ensembles, **options)


def check_written(result, output: ModelOutput) -> None:
    """Check that the structure in the file is `output`'s."""
    chain = read_chain(result.structure(0), "A")
    present = chain.mask > 0
    np.testing.assert_allclose(chain.positions[present], output.structure.positions[0].numpy()[present], atol=1e-3)


def test_ensembling_draws_and_averages(workplace):
    """Catches a wrong number of feature sets or passes, and a structure that is not the ensemble's.

    Two passes of three sets are six draws, but two passes in the timings.
    """
    lines: list[str] = []
    workplace.only("alpha_A")
    result = predict(workplace.change(ensembles=3, seeds=1, recycles=1), lines.append)[0]
    check_written(result, by_hand(workplace, 1, 3))
    assert len(read_json(result.folder / "timings.json")["seeds"][0]["pass_seconds"]) == 2
    assert read_json(result.folder / "ranking.json")["settings"]["ensembles"] == 3
    assert any(line.startswith("sizes: ") and line.endswith(", ensembles 3") for line in lines)
    single = predict(workplace.change(seeds=1, recycles=1, output=workplace.root / "single"), silent)[0]
    assert single.structure().read_bytes() != result.structure().read_bytes()
    with pytest.raises(UserError, match="ensembles: 3 there, 1 now"):
        predict(workplace.change(seeds=1, recycles=1), silent)


def test_recycling_stops_and_says_so(workplace):
    """Catches a tolerance that is ignored, and a number of passes or a change missing from the log or the timings.

    The tolerance is always met, so recycling must stop after two of five passes.
    """
    lines: list[str] = []
    result = predict(workplace.change(recycles=4, stop_tolerance=1e3, seeds=1), lines.append)[0]
    expected = by_hand(workplace, 4, 1, stop_tolerance=1e3)
    check_written(result, expected)
    (seed,) = read_json(result.folder / "timings.json")["seeds"]
    assert len(seed["pass_seconds"]) == 2
    assert expected.ca_change is not None
    assert seed["ca_change"] == pytest.approx(float(expected.ca_change[0]), abs=1e-3)
    assert any("(2 of 5 passes," in line and f"changed by {seed['ca_change']:.2f} Å" in line for line in lines)
    assert read_json(result.folder / "ranking.json")["settings"]["stop_tolerance"] == 1e3


def test_a_tolerance_of_zero_is_none(workplace, finished: Finished):
    """Catches a tolerance of 0 that makes earlier results count as another run's."""
    first = finished.results[0]
    again = predict(workplace.change(seeds=1, stop_tolerance=0.0), silent)[0]
    assert again.kept
    assert "ca_change" not in read_json(first.folder / "timings.json")["seeds"][0]


def test_recycling_goes_on_until_every_sample_has_settled(workplace):
    """Catches a batch that stops when only one of its samples has converged, or that never stops."""
    output = by_hand(workplace, 1, 1, stop_tolerance=0.1, samples=2)
    assert output.ca_change is not None
    assert len(output.ca_change) == 2
    for changes, expected in (([0.1, 5.0], False), ([5.0, 0.1], False), ([0.1, 1.0], True)):
        assert settled(replace(output, ca_change=torch.tensor(changes)), 1.0) == expected
    assert not settled(replace(output, ca_change=None), 1.0), "after the first pass there is no change yet"


class Casts(TorchDispatchMode):
    """Counts casts of a model's parameters, one by one and all together."""

    def __init__(self, model: AlphaFold) -> None:
        super().__init__()
        self.parameters = {parameter.data_ptr() for parameter in model.parameters()}
        self.alone = self.together = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.together += func is torch.ops.aten._foreach_copy_.default
        if func in (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default):
            self.alone += args[0].data_ptr() in self.parameters and result.dtype != args[0].dtype
        return result


def test_parameters_are_cast_once(workplace: Workplace) -> None:
    """Catches casts of a parameter in each operator that uses it, a third of all launches, and other numbers by them."""
    model = load_model(workplace.config.checkpoint)
    query = ProteinSequence("alpha_A", QUERY)
    alignments = read_alignment_dir(workplace.config.alignments / "alpha_A", query)
    config = replace(TRAINED, crop_size=None, msa_clusters=5, extra_msa=4, recycles=1)
    batch = collate([prediction_sample(query, alignments, config, 0)])
    with Casts(model) as casts:
        found, _ = run_passes(PassRunner(model, workplace.change(precision="bf16").passes), batch, lambda _: None)
    assert (casts.alone, casts.together) == (0, 1)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = model(batch)
    torch.testing.assert_close(found.structure.positions, expected.structure.positions, rtol=0, atol=0)
    torch.testing.assert_close(found.logits["plddt"], expected.logits["plddt"], rtol=0, atol=0)


def structure_from(
    heads: HeadsConfig, residues: int = 30, padding: int = 5, **logits: torch.Tensor
) -> PredictedStructure:
    """The record of a chain, from logits [bins] that all pairs of residues have."""
    rows = residues + padding
    model = MagicMock(spec=AlphaFold, exchange=LocalExchange(), config=replace(ModelConfig.preset("test"), heads=heads))
    structure = MagicMock(spec=StructureOutput)
    structure.positions, structure.mask = torch.zeros(1, rows, 37, 3), torch.ones(1, rows, 37)
    pairs = {name: x.expand(1, rows, rows, -1) for name, x in logits.items()}
    output = ModelOutput({}, structure, {**pairs, "plddt": torch.zeros(1, rows, 5)})
    mask = torch.zeros(1, 1, rows)
    mask[..., :residues] = 1
    target = Target(ProteinSequence("a", "A" * residues), None)
    batch = {"aatype": torch.zeros(1, 1, rows, dtype=torch.int32), "seq_mask": mask}
    return structure_of(target, batch, output, model)


def test_the_heads_ranges_are_the_models():
    """Catches a range of AlphaFold2's heads, or padding, in the confidence of a model whose heads have another one."""
    heads = HeadsConfig(
        predicted_aligned_error=True, pae_max_error=20.0, pae_bins=12, distogram_min_distance=4.0,
        distogram_max_distance=12.0, distogram_bins=10,
    )  # fmt: skip
    certain = torch.full((12,), -1e4)
    certain[0] = 0.0  # the bin's centre is 1 Å
    found = structure_from(heads, distogram=torch.zeros(10), predicted_aligned_error=certain)
    assert found.aligned_error is not None
    np.testing.assert_allclose(found.aligned_error.pae, np.ones((30, 30)))
    assert found.aligned_error.highest == pytest.approx(23.0)
    d0 = 1.24 * (30 - 15) ** (1 / 3) - 1.8
    assert found.aligned_error.ptm == pytest.approx(1 / (1 + 1 / d0**2), rel=1e-5)
    # Edges at 4, 5, ..., 12 Å: of ten bins, five end by 8 Å.
    np.testing.assert_allclose(found.contacts, np.full((30, 30), 0.5), rtol=1e-6)


def test_both_names_of_a_precision(tmp_path: Path) -> None:
    """Catches bf16-mixed, the trainer's name, refused or taken for float32."""
    for name, half in (("fp32", False), ("32-true", False), ("bf16", True), ("bf16-mixed", True)):
        given: Any = {"inputs": [tmp_path], "checkpoint": tmp_path, "output": tmp_path, "precision": name}
        passes = PredictConfig(**given).passes
        assert (passes.half, passes.precision) == (half, "bf16" if half else "fp32")
        assert computes_in_half(cast(LayerPrecision, name)) == half


def test_a_clock_on_a_gpu_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a host that waits for the GPU after each pass, and times in another unit than seconds."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("record")
            self.at = 2000.0 * len(done)

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = PassClock(torch.device("cuda"))
    clock.mark()
    clock.mark()
    assert done == ["record"] * 3
    assert clock.seconds() == (2.0, 2.0)
    assert done == [*["record"] * 3, "wait"]


@pytest.mark.verify
def test_dropout_differs_by_seed_and_is_repeated(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches dropout that is ignored, in the structure module, the same for all seeds, or other when layers compute in pieces;
    and finished predictions without dropout that are taken for some with it."""
    workplace.only("alpha_A")
    monkeypatch.setattr("evodsp.model.structure_module.draw_masks", None)

    def positions(output: str, **options: Any) -> list[np.ndarray]:
        (result,) = predict(workplace.change(output=workplace.root / output, recycles=1, **options), silent)
        return [read_chain(result.structure(seed), "A").positions for seed in (0, 1)]

    # The same features for both seeds: what differs is dropout.
    real = seeds._features
    monkeypatch.setattr(
        seeds, "_features", lambda target, msa, features, seed, *rest: real(target, msa, features, 0, *rest)
    )
    without, dropped, again = positions("without"), positions("with", dropout=True), positions("again", dropout=True)
    pieces = positions("pieces", dropout=True, working_memory="0.05MB")
    np.testing.assert_array_equal(without[0], without[1])
    for seed in (0, 1):
        assert np.abs(dropped[seed] - without[seed]).max() > 0.01
        np.testing.assert_array_equal(dropped[seed], again[seed])
        np.testing.assert_allclose(dropped[seed], pieces[seed], atol=2e-3)
    assert np.abs(dropped[0] - dropped[1]).max() > 0.01
    assert "dropout" in (workplace.root / "with" / "alpha_A" / "seed_0.cif").read_text()
    with pytest.raises(UserError, match=r"another run \(dropout: None there, True now\)"):
        positions("without", dropout=True)


Batch = dict[str, Tensor]
CYCLES = 4


class Silent(Rerun):
    """Repeats without operators that are counted, as a graph does. Counts what is freed."""

    def __init__(self) -> None:
        self.freed = self.recorded = 0
        self.replaying = False

    def record(self, run_recorded: Any, pool: Any) -> Taken:
        taken = super().record(run_recorded, pool)
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


def run_recorded(runner: PassRunner, batch: Batch) -> ModelOutput:
    output, _ = run_passes(runner, runner.sized(batch), lambda _: None)
    assert not runner.given_up
    return output


def launched(model: AlphaFold, batch: Batch) -> ModelOutput:
    return run_recorded(PassRunner(model, PassSettings(cuda_graphs=False)), batch)


def positions_of(output: ModelOutput, residues: int) -> Tensor:
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
        found = run_recorded(runner, batch)
        expected = run_recorded(usual, batch)
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
        off = (positions_of(found, 25) - positions_of(expected, 25)).abs().max()
        assert float(off / positions_of(expected, 25).abs().max()) < 1e-6
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
    assert positions_of(run_recorded(runner, long), 28).isnan().any()
    found, expected = run_recorded(runner, short), launched(model, short)
    assert recorder.recorded == 1
    assert found.structure.positions.shape[1] == 28
    off = (positions_of(found, 25) - expected.structure.positions).abs().max()
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
        run_recorded(runner, batch_of(residues, 4, 4))
    assert (recorder.recorded, recorder.freed) == (4, 1)
    run_recorded(runner, batch_of(9, 4, 4))  # as 10
    assert recorder.recorded == 4
    run_recorded(runner, {name: x[:, :2] for name, x in batch_of(9, 4, 4).items()})
    assert recorder.freed == 4


class Failing(Rerun):
    """Fails at the first recording but `good`."""

    def __init__(self, good: int = 0, error: type[Exception] = RuntimeError) -> None:
        self.good, self.error, self.begun = good, error, 0

    def record(self, run_recorded: Any, pool: Any) -> Taken:
        self.begun += 1
        if self.begun > self.good:
            raise self.error("operation not permitted")
        return super().record(run_recorded, pool)


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
