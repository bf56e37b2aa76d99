"""--ensembles and --stop_tolerance: their effect on the model and on the output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.config import HeadsConfig, LayerPrecision, ModelConfig, computes_in_half
from evodsp.data.formats.mmcif import read_chain
from evodsp.data.records import ProteinSequence
from evodsp.data.samples.dataset import collate
from evodsp.data.sources.layout import read_alignment_dir
from evodsp.errors import UserError
from evodsp.features.batch import prediction_sample
from evodsp.inference import seeds
from evodsp.inference.config import PredictConfig
from evodsp.inference.predict import predict
from evodsp.inference.seeds import PassClock, PassRunner, run_passes, structure_of
from evodsp.inference.structure_files import PredictedStructure
from evodsp.inference.targets import Target
from evodsp.model.alphafold import AlphaFold, settled
from evodsp.model.heads import ModelOutput, StructureOutput
from evodsp.parallel.exchange import LocalExchange
from evodsp.weights.checkpoint import load_model
from tests.builders.prediction import read_json, silent

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


@pytest.mark.parametrize(
    ("value", "expected"), [({"ensembles": 0}, "--ensembles is 0"), ({"stop_tolerance": -0.5}, "--stop_tolerance is -0.5"),
                        ({"stop_tolerance": float("nan")}, "--stop_tolerance is nan")]
)  # fmt: skip
def test_numbers_out_of_range(workplace, value, expected):
    """Catches an ensemble of zero, or a negative or NaN tolerance, that is accepted."""
    with pytest.raises(UserError, match=expected):
        workplace.change(**value)


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
