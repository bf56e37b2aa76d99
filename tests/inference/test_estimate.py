"""What a prediction needs is said before it runs, and what does not fit is refused with what to change."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.cli import main
from evodsp.config import ModelConfig, as_multimer
from evodsp.errors import UserError
from evodsp.inference import estimate
from evodsp.inference.config import PassSettings
from evodsp.inference.estimate import add_plan, plan_prediction
from evodsp.inference.predict import predict_records
from evodsp.model.alphafold import AlphaFold
from evodsp.planner import device as devices
from evodsp.planner.prediction import Machine, PlannedPrediction, changes, prediction_memory, size
from evodsp.planner.program import SampleSizes
from evodsp.report.page import Page
from evodsp.weights.checkpoint import save_model
from tests.builders.prediction import silent

from .conftest import Workplace

SMALL = ["estimate", "--preset=small", "--msa_clusters=16", "--extra_msa=16"]


@pytest.fixture
def workplace(workplace: Workplace) -> Workplace:
    """A target and a seed are as good as several."""
    workplace.only("alpha_A")
    return Workplace(workplace.root, workplace.change(seeds=1))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also tiny targets are told what they need."""
    monkeypatch.setattr(estimate, "TINY", 0.0)


def test_a_target_says_what_it_needs(workplace, told) -> None:
    """Catches an estimate that is not printed before the model runs."""
    lines: list[str] = []
    predict_records(workplace.config, lines.append)
    (line,) = [number for number, line in enumerate(lines) if "the model: needs" in line][:1]
    assert "MiB" in lines[line]
    assert any("model," in later for later in lines[line + 1 :])


def test_a_target_that_does_not_fit_is_named_and_try_anyway_runs_it(workplace, told, monkeypatch) -> None:
    """Catches a target that fills the memory, or one that is lost though the user wants to try."""
    monkeypatch.setattr("evodsp.planner.prediction.free_memory", lambda: -(1 << 40))
    monkeypatch.setattr(estimate, "changes", lambda *_: [])  # following each option takes seconds
    with pytest.raises(UserError, match=r"no setting makes it fit.*--try_anyway"):
        predict_records(workplace.config, silent)
    assert predict_records(workplace.change(try_anyway=True), silent).failures == []


def test_a_target_that_may_fit_is_tried(workplace, told, monkeypatch) -> None:
    """Catches a target that is refused because the estimate is a little too high."""
    calculated = prediction_memory(
        PlannedPrediction(ModelConfig.preset("small"), SampleSizes(20, 4, 4), memory=1 << 20)
    )
    total = calculated.total
    monkeypatch.setattr("evodsp.planner.prediction.prediction_memory", lambda _: calculated)
    free = int(0.9 * total) - calculated.weights - calculated.features
    monkeypatch.setattr("evodsp.planner.prediction.free_memory", lambda: free)
    lines: list[str] = []
    assert predict_records(workplace.config, lines.append).failures == []
    assert any(line.endswith("; it may not fit") for line in lines)


def test_tiny_targets_are_not_followed(workplace, monkeypatch) -> None:
    """Catches a folder of small targets that becomes slow."""
    monkeypatch.setattr("evodsp.planner.prediction.prediction_memory", None)
    assert predict_records(workplace.config, silent).failures == []


def test_changes_name_what_fits() -> None:
    """Catches an option that does not help, and help that takes several options."""
    what = PlannedPrediction(ModelConfig.preset("small"), SampleSizes(100, 40, 2000), memory=256 << 20)
    assert changes(what, lambda one: one.half) == ["--precision bf16"]
    assert changes(what, lambda one: one.ranks >= 3) == ["--parallel.sequence 4"]
    both = changes(what, lambda one: one.half and one.sizes.extra < 2000)
    assert both == ["--precision bf16 --working_memory 64MiB --extra_msa 1024"]
    assert changes(what, lambda one: False) == []


def test_similar_sizes_share_a_calculation() -> None:
    """Catches a grid that lies below a size, or is coarser than the estimate."""
    for number in (33, 100, 511, 512, 2048, 5120):
        assert number <= estimate._rounded(number) <= 1.05 * number + 1


def test_estimate_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a column of the JSON file that differs from the text, and an exit code that does not say that it fits."""
    output = tmp_path / "numbers.json"
    assert main([*SMALL, "--residues=40", "--device=h100", "--parallel.sequence=2", f"--output={output}"]) == 0
    said = capsys.readouterr().out
    (one,) = json.loads(output.read_text())
    assert one["total_bytes"] == sum(one["bytes"].values())
    assert f"needs {size(one['total_bytes'])} on each of 2 ranks" in said
    assert one["fits"]
    assert one["communicated_bytes_a_pass"] > 0


@pytest.mark.verify
def test_estimate_counts_recorded_passes(tmp_path: Path) -> None:
    """Catches an option `cuda_graphs` that changes nothing, and the memory of a recording that the estimate lacks."""
    found = []
    for graphs in ("true", "false"):
        output = tmp_path / f"{graphs}.json"
        assert main([*SMALL, "--residues=40", "--device=h100", f"--cuda_graphs={graphs}", f"--output={output}"]) == 0
        found += json.loads(output.read_text())
    recorded, launched = found
    assert recorded["bytes"]["recorded"] > recorded["bytes"]["layers"]
    assert launched["bytes"]["recorded"] == 0
    assert recorded["seconds_a_seed"] < launched["seconds_a_seed"]


@pytest.mark.verify
def test_estimate_says_what_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a device of one's own that is not read, and a model that does not fit with exit code 0."""
    content = (Path(devices.__file__).parent / "devices" / "h100.yaml").read_text()
    own = tmp_path / "tiny.yaml"
    own.write_text(content.replace("memory_gib: 79.1", "memory_gib: 1.6"))
    assert main([*SMALL, "--residues=400", f"--device={own}"]) == 1
    assert "does not fit; it would with --" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device=h100"], "INPUT... or --residues N, but neither"),
        (["--residues=0"], "--residues is 0"),
        (["--residues=9", "--device=h1"], "no device 'h1'"),
        (["--residues=9", "--parallel.sequence=20"], "it can be at most 9"),
        (["--fasta=none.fasta"], "none.fasta: no such file or folder"),
        (["none.fasta"], "none.fasta: no such file or folder"),
        (["none.fasta", "--fasta=other.fasta"], "--fasta other.fasta is given beside none.fasta"),
        (["none.fasta", "--residues=9"], "INPUT... or --residues N, but both"),
        (["--residues=9", "--weights=model_7"], "no published parameters are called 'model_7'"),
        (
            ["--residues=9", "--weights=model_1", "--preset=model_2"],
            "--weights model_1 and --preset model_2 are both given",
        ),
        (["--residues=9", "--checkpoint=none.ckpt"], "none.ckpt: no such checkpoint"),
        (["--residues=9", "--gpus=0"], "--gpus is 0"),
        (["--residues=9", "--gpus=4", "--parallel.sequence=2"], "--gpus 4 compares numbers of ranks, but"),
        (
            ["--residues=9", "--output=plan.txt", "--gpus=2"],
            "--output is plan.txt, but its name must end in .json or .html",
        ),
        (["--residues=9", "--output=plan.html"], "must end in .json; a page draws what --gpus compares"),
    ],
)
def test_wrong_input_is_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback."""
    assert main(["estimate", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


def test_a_chain_whose_pair_representation_does_not_fit_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a million residues whose pass is followed, which takes minutes."""
    monkeypatch.setattr("evodsp.planner.prediction.prediction_memory", None)
    output = tmp_path / "numbers.json"
    assert main([*SMALL, "--residues=1000000", "--device=h100", "--precision=bf16", f"--output={output}"]) == 1
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("1,000,000 residues: does not fit; the pair representation alone takes ")
    assert "73.6 GiB are free; raise --parallel.sequence" in line
    (one,) = json.loads(output.read_text())
    channels = ModelConfig.preset("small").channels.pair
    assert (one["fits"], one["bytes"]) == (False, {"pair": 10**12 * channels * 2})


@pytest.mark.verify
def test_records_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches records of one length that are listed twice, and a broken one that is left out silently."""
    fasta = tmp_path / "three.fasta"
    fasta.write_text(">a\nMKTAYIAK\n>b\nMKTAYIAG\n>c\nMK1\n")
    assert main(["estimate", "--preset=test", "--device=h100", f"--fasta={fasta}"]) == 0
    said = capsys.readouterr().out
    assert said.count("8 residues (a, b): needs") == 1
    assert "left out" in said
    a3m = tmp_path / "long.a3m"
    a3m.write_text(">q\nMKTAYIAKQR\n>hit\nMKTAYIAKQK\n")
    assert main(["estimate", str(fasta), str(a3m), "--preset=test", "--device=h100"]) == 0
    said = capsys.readouterr().out
    assert said.count("8 residues (a, b): needs") == 1
    assert "10 residues (long): needs" in said


@pytest.mark.verify
def test_the_depth_of_alignments_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an estimate of minutes for what takes seconds, because full alignments are assumed without a word."""
    (tmp_path / "a").mkdir()
    rows = "".join(f">hit{number}\nMKTAYIAK\n" for number in range(19))
    (tmp_path / "a" / "deep.a3m").write_text(f">q\nMKTAYIAK\n{rows}")
    (fasta := tmp_path / "in.fasta").write_text(">deep\nMKTAYIAK\n>alone\nMKTAYIAG\n")
    words = [*SMALL, "--device=h100", str(fasta), f"--output={tmp_path / 'o.json'}"]
    assumed = "Alignments are assumed to be as deep as the model takes"
    assert main(words) == 0
    assert assumed in capsys.readouterr().out
    assert main([*words, f"--alignments={tmp_path / 'a'}"]) == 0
    said = capsys.readouterr().out
    assert assumed not in said
    assert "alignments of at most 20 rows: " in said
    found = {
        one["names"][0]: (one["msa_rows"], one["extra_rows"]) for one in json.loads((tmp_path / "o.json").read_text())
    }
    assert found == {"deep": (16, 4), "alone": (1, 1)}


@pytest.mark.verify
def test_chains_of_a_complex_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a complex estimated as one chain, whose interfaces are not scored, one that the model cannot predict, and a
    number of residues alone that is taken for a single chain."""
    save_model(tmp_path / "m.ckpt", AlphaFold(as_multimer(ModelConfig.preset("test"))))
    (fasta := tmp_path / "in.fasta").write_text(">x\nMKT:GST:MKT\n>alone\nMKTGSTMKT\n")
    words = ["estimate", "--device=h100", f"--checkpoint={tmp_path / 'm.ckpt'}", f"--output={tmp_path / 'o.json'}"]
    assert main([*words, str(fasta)]) == 0
    said = capsys.readouterr().out
    assert "9 residues in 3 chains (x): needs" in said
    assert "9 residues (alone): needs" in said
    assert [one["chains"] for one in json.loads((tmp_path / "o.json").read_text())] == [1, 3]
    assert main([*words, "--residues=9"]) == 0
    assert "9 residues in 2 chains: needs" in capsys.readouterr().out
    assert main(["estimate", "--preset=test", "--device=h100", str(fasta)]) == 0
    said = capsys.readouterr().out
    assert "left out: x: a complex of 3 chains, but test is a model of single chains" in said
    assert "9 residues (alone): needs" in said


def machine(name: str = "h100", **changes: Any) -> Machine:
    """An idle device, with other rates or another memory."""
    found = Machine.named(name)
    assert found.device is not None
    device = dataclasses.replace(found.device, **changes)
    return dataclasses.replace(found, device=device, free=device.usable)


@pytest.mark.verify
def test_numbers_of_ranks_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches other numbers than those of a single number of ranks, a share of the devices that is counted as all of them, an
    axis that does not begin at zero, and a length that is left out."""
    (fasta := tmp_path / "in.fasta").write_text(f">a\nMKTAYIAK\n>b\n{'MKTAYIAK' * 5}\n")
    page, alone = tmp_path / "ranks.html", tmp_path / "alone.json"
    words = [*SMALL, "--device=h100", "--precision=bf16", str(fasta)]
    assert main([*words, "--gpus=5", f"--output={page}"]) == 0
    printed = capsys.readouterr().out
    assert [
        printed.count(text) for text in ("5 x H100", "one structure soonest: --parallel.sequence", "on 5 devices")
    ] == [*(1, 2, 2)]
    found = json.loads(page.with_suffix(".json").read_text())
    assert [(one["residues"], one["ranks"]) for one in found] == [(n, ranks) for n in (8, 40) for ranks in (1, 2, 4)]
    assert main([*words, "--parallel.sequence=2", f"--output={alone}"]) == 0
    for one, other in zip(found[1::3], json.loads(alone.read_text()), strict=True):
        # Not exact: tables that the first pass of a process makes are not made again.
        assert one["seconds_a_seed"] == pytest.approx(other["seconds_a_seed"], rel=5e-3)
        assert one | {"seconds_a_seed": 0, "exposed_seconds": 0} == other | {"seconds_a_seed": 0, "exposed_seconds": 0}
    row = next(line.split() for line in printed.splitlines() if line.split()[:1] == ["2"])
    assert float(row[4].replace(",", "")) == pytest.approx(2 * 3600 / found[1]["seconds_a_seed"], rel=1e-2)
    html = page.read_text()
    assert all(text in html for text in ("not measured", "Memory of a device", "Structures an hour", "40 residues (b)"))
    charts = re.findall(r"<svg[^>]*by ranks of a.*?</svg>", html, re.DOTALL)
    assert len(charts) == 4
    assert all(re.search(r'<text[^>]*text-anchor="end"[^>]*>0</text>', chart) for chart in charts)


def test_a_record_too_long_for_all_devices_costs_the_others_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a command that ends at the first chain that no number of devices holds, and an exit code that does not say so."""
    content = (Path(devices.__file__).parent / "devices" / "h100.yaml").read_text()
    (own := tmp_path / "tiny.yaml").write_text(content.replace("memory_gib: 79.1", "memory_gib: 1.6"))
    (fasta := tmp_path / "in.fasta").write_text(f">long\n{'MKTAYIAK' * 4000}\n>short\nMKTAYIAK\n")
    output = tmp_path / "ranks.html"
    assert main([*SMALL, f"--device={own}", str(fasta), "--gpus=2", f"--output={output}"]) == 1
    said = capsys.readouterr().out
    assert "32,000 residues (long): does not fit; the pair representation alone takes" in said
    assert "one structure soonest" in said
    found = json.loads(output.with_suffix(".json").read_text())
    assert [(one["names"], one["fits"]) for one in found] == [(["short"], True)] * 2 + [(["long"], False)]


def test_rows_of_templates_are_shared_out_too() -> None:
    """Catches a plan without the ranks that hold templates' rows of the MSA only."""
    what = PlannedPrediction(ModelConfig.preset("test"), SampleSizes(40, 3, 32, templates=2))
    found = plan_prediction(what, 4, machine())
    assert found is not None
    assert [share.what.ranks for share in found.shares] == [1, 2, 4]


@pytest.mark.verify
def test_ranks_on_a_crowded_node_or_with_little_room() -> None:
    """Catches ranks that pay nothing for their neighbours, a green tick for a count of bytes that is just below the memory, and
    a plan that names the fastest of what does not fit."""
    what = PlannedPrediction(ModelConfig.preset("test"), SampleSizes(40, 24, 32), half=True)
    alike, crowded = (plan_prediction(what, 2, machine(crowding=c)) for c in (1.0, 3.0))
    assert alike is not None
    assert crowded is not None
    own, shared = (
        [share.one_pass.device for share in found.shares if share.one_pass is not None] for found in (alike, crowded)
    )
    assert own[0] == pytest.approx(shared[0])
    one_of_seven = 9 / 7  # neighbours
    assert shared[1] == pytest.approx(own[1] * one_of_seven)
    needs = alike.shares[0].memory.total / 2**30
    for share, tight, fits in ((0.96, False, True), (0.98, True, True), (1.1, False, False)):
        little = dataclasses.replace(
            alike,
            machine=machine(memory_gib=needs / share, fragmentation=0.0, reserved_gib=0.0),
            shares=alike.shares[:1],
        )
        page = Page("", "")
        add_plan(page, little)
        html = page.html()
        assert ("less than 3% of the memory is free" in html) == tight
        assert ("✓" in html) == (fits and not tight)
        assert ("nothing fits: 1 rank needs" in html) != fits


def test_chains_of_features_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a complex that is followed as one chain before it runs, and padding that counts as a chain."""
    followed: list[PlannedPrediction] = []
    monkeypatch.setattr(estimate, "TINY", 0.0)
    monkeypatch.setattr(estimate, "prediction_needs", lambda what, *_: followed.append(what))
    model = AlphaFold(as_multimer(ModelConfig.preset("test")))
    batch = {name: torch.zeros(1, 1, 4, 9, 3) for name in ("msa_feat", "extra_msa")}
    batch |= {"template_mask": torch.zeros(1, 1, 2), "aatype": torch.zeros(1, 1, 9)}
    for chains in ({"asym_id": torch.tensor([1, 1, 2, 2, 3, 0])}, {}):
        with pytest.raises(AttributeError):  # of what is followed, which has no memory here
            estimate.check_needs("x", 9, batch | chains, model, PassSettings(), False)
    assert [what.sizes.chains for what in followed] == [3, 1]


@pytest.mark.verify
def test_a_published_model_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches --weights that is ignored, and one that wants the file of the parameters."""
    said = []
    for model in ("--weights=model_3", "--preset=model_3", "--weights=model_1"):
        assert main(["estimate", "--residues=30", "--device=h100", model]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
