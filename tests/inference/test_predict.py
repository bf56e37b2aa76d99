"""From FASTA, alignments and a checkpoint to files, also of models with the PAE head; and errors for inputs that are none."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path

import modelcif.model
import modelcif.qa_metric
import modelcif.reader
import numpy as np
import pytest
import torch

from evodsp.config import FeatureConfig, KernelsConfig
from evodsp.data.formats.mmcif import read_chain
from evodsp.data.records import ProteinSequence
from evodsp.data.samples.dataset import Sample, collate
from evodsp.data.sources.layout import read_alignment_dir
from evodsp.errors import UserError
from evodsp.features.batch import prediction_sample
from evodsp.inference import jobs, results, seeds
from evodsp.inference import predict as module
from evodsp.inference.devices import device_of
from evodsp.inference.predict import _alone, predict, predict_records
from evodsp.inference.prediction import Prediction
from evodsp.inference.results import read_plddt, read_result, write_results
from evodsp.inference.structure_files import AlignedError, PredictedStructure
from evodsp.model.alphafold import AlphaFold
from evodsp.model.heads import compute_pae, compute_ptm
from evodsp.weights.checkpoint import load_model, save_model
from tests.builders.prediction import read_json, silent

from .conftest import OTHER, QUERY, TRAINED, Finished, Workplace, make_workplace

SIZES = {"recycles": 2, "msa_clusters": 7, "extra_msa": 3}  # as in the fixture's checkpoint


def test_all_files_of_two_targets(workplace, predicted: Finished):
    """Catches files of the output folder that are missing, superfluous or wrongly named, a PAE without its head, seeds in the
    wrong order, a mean pLDDT unlike the scores, missing stages, and a long run that does not print which stage it is in."""
    found = predicted.results
    assert [r.name for r in found] == ["alpha_A", "beta_A"]
    output = found[0].folder.parent
    assert output.parts[-2:] == workplace.config.output.parts[-2:]
    for result, query in zip(found, (QUERY, OTHER), strict=True):
        folder = output / result.name
        assert sorted(p.name for p in folder.iterdir()) == [
            "ranking.json", "report.html", "seed_0.cif", "seed_0_contacts.npz", "seed_0_scores.json", "seed_1.cif",
            "seed_1_contacts.npz", "seed_1_scores.json",
            "timings.json",
        ]  # fmt: skip
        assert read_chain(folder / "seed_0.cif", "A").sequence == query
        ranking = read_json(folder / "ranking.json")["ranking"]
        means = {}
        for entry in ranking:
            assert entry["structure"] == f"seed_{entry['seed']}.cif"
            scores = read_json(folder / f"seed_{entry['seed']}_scores.json")
            assert list(scores) == ["plddt"]
            assert len(scores["plddt"]) == len(query)
            assert all(0 <= value <= 100 for value in scores["plddt"])
            means[entry["seed"]] = np.mean(scores["plddt"])
            assert entry["mean_plddt"] == pytest.approx(means[entry["seed"]], abs=0.01)
        assert [entry["seed"] for entry in ranking] == sorted(means, key=lambda seed: -means[seed])
        assert len({*means.values()}) == 2, "seeds must differ, or ranking means nothing"
        assert result.structure() == folder / f"seed_{result.best}.cif"
    assert {p.name for p in output.iterdir()} == {"alpha_A", "beta_A", "index.html", "predictions.csv"}
    timings = read_json(found[0].folder / "timings.json")
    for stage in ("features_seconds", "model_seconds", "writing_seconds"):
        assert timings[stage] >= 0
    passes = [second for seed in timings["seeds"] for second in seed["pass_seconds"]]
    assert timings["model_seconds"] == pytest.approx(sum(passes), abs=5e-3)
    assert timings["alignment_rows"] == 12
    assert timings["peak_memory_mib"] > 50
    text = "\n".join(predicted.lines)
    stages = ("[1/2] alpha_A: 22 residues", "read 12 sequences", "seed 1: features", "seed 1: model", "1 pass", "best:")
    for words in stages:
        assert words in text
    assert not any("\n" in line for line in predicted.lines)
    assert not any("templates" in line or "pTM" in line for line in predicted.lines)


def test_sizes_are_those_of_training(workplace):
    """Catches defaults used instead of the checkpoint's sizes.

    The run without flags must equal the run with the training sizes given, and its results must be kept.
    """
    workplace.only("beta_A")
    unset, given = workplace.change(**dict.fromkeys(SIZES)), workplace.change(**SIZES, output=workplace.root / "given")
    lines: list[str] = []
    found, again = predict(unset, lines.append)[0], predict(given, silent)[0]
    for name in ("seed_0.cif", "seed_1.cif", "seed_1_scores.json", "ranking.json"):
        assert (found.folder / name).read_bytes() == (again.folder / name).read_bytes()
    assert read_json(found.folder / "ranking.json")["settings"].items() >= SIZES.items()
    assert len(read_json(found.folder / "timings.json")["seeds"][0]["pass_seconds"]) == SIZES["recycles"] + 1
    assert "sizes: recycles 2, msa_clusters 7, extra_msa 3" in lines
    assert all(r.kept for r in predict(workplace.change(**SIZES), silent))


def test_sizes_given_take_the_place_of_those_of_training(workplace):
    """Catches a flag that changes other sizes too: masking and template rows stay as in training."""
    features = jobs.feature_config(workplace.change(**{**dict.fromkeys(SIZES), "extra_msa": 4}).sizes, TRAINED)
    assert features == replace(TRAINED, crop_size=None, uniform_recycling=False, extra_msa=4)
    assert jobs.sizes_line(features, TRAINED, 1) == "sizes: recycles 2, msa_clusters 7, extra_msa 4 (default 3)"


def test_a_checkpoint_without_sizes_takes_the_defaults(workplace, checkpoint):
    """Catches an error for weights saved without feature sizes."""
    save_model(workplace.root / "bare.ckpt", load_model(checkpoint))
    (model,) = jobs.read_run(workplace.change(checkpoint=workplace.root / "bare.ckpt")).models
    assert (model.trained.msa_clusters, model.trained.extra_msa) == (128, 1024)


def test_same_seed_same_bytes(workplace, predicted: Finished):
    """Catches files that depend on anything but the inputs, such as the number of seeds."""
    first = predicted.results
    for a, b in zip(first, predict(workplace.config, silent), strict=True):
        for name in ("seed_0.cif", "seed_1.cif", "seed_1_scores.json", "ranking.json"):
            assert (a.folder / name).read_bytes() == (b.folder / name).read_bytes()
        assert (a.folder / "seed_0.cif").read_bytes() != (a.folder / "seed_1.cif").read_bytes()
    workplace.only("alpha_A")
    single = predict(workplace.change(output=workplace.root / "single", seeds=1, first_seed=1), silent)
    assert (single[0].folder / "seed_1.cif").read_bytes() == (first[0].folder / "seed_1.cif").read_bytes()


def test_many_records_have_a_line_each(workplace, monkeypatch):
    """Catches a log of thousands of records with five lines each, a time left that counts records as equally long, and failures
    that have scrolled away."""
    monkeypatch.setattr(module, "_DETAILED", 1)
    left: list[float] = []
    monkeypatch.setattr(module, "duration", lambda seconds: left.append(seconds) or "5 s")
    lines: list[str] = []
    begun = time.perf_counter()
    with workplace.config.fasta.open("a") as records:
        records.write(">gamma\nXXXX\n")
    predict(workplace.change(alignments=None, seeds=1, output=workplace.root / "many"), lines.append)
    said = [line for line in lines if line.startswith("[")]
    assert len(said) == 2
    for line, start in zip(said, (r"\[1/2\] alpha_A: 22", r"\[2/2\] beta_A: 10"), strict=True):
        assert re.fullmatch(start + r" residues, pLDDT [\d.]+, [\d.]+ s; 5 s left", line)
    assert (
        sum("2 records without alignments (alpha_A, …): predicted from the sequence alone" in line for line in lines)
        == 1
    )
    assert 0 < left[0] < 0.25 * (time.perf_counter() - begun), "a record of half the length takes a quarter of the time"
    assert left[1] == 0
    assert not any(line.startswith("  ") for line in lines)
    failed = [number for number, line in enumerate(lines) if line.startswith("failed: ") and "gamma" in line]
    assert failed == [0, len(lines) - 2], "the first line, and the last but one"
    lines.clear()
    predict(workplace.change(alignments=None, seeds=1, output=workplace.root / "many"), lines.append)
    assert [line for line in lines if line.startswith("[")] == [
        f"[{place}/2] {name}, kept; 5 s left"
        for place, name in enumerate(("alpha_A: 22 residues", "beta_A: 10 residues"), start=1)
    ]


def test_finished_targets_are_kept(workplace, finished: Finished, monkeypatch):
    """Catches finished targets that are predicted again, or a checkpoint that is loaded for nothing."""
    before = {path: path.stat().st_mtime_ns for path in workplace.config.output.rglob("*")}
    monkeypatch.setattr(jobs, "load_model", lambda *_: pytest.fail("the model was loaded for nothing"))
    lines: list[str] = []
    found = predict(workplace.config, lines.append)
    assert [r.kept for r in found] == [True, True]
    assert len(found[0].mean_plddt) == 2
    assert sum("kept:" in line for line in lines) == 2
    assert {path: path.stat().st_mtime_ns for path in workplace.config.output.rglob("*")} == before


def test_results_of_other_settings_are_not_taken_for_these(workplace, finished: Finished):
    """Catches results of other settings that are kept, or overwritten without --overwrite."""
    before = workplace.snapshot()
    for change, named in (
        ({"recycles": 1}, "recycles: 0 there, 1 now"),
        ({"raw": True}, "raw"),
        ({"precision": "bf16"}, "precision: None there, bf16 now"),
        ({"matmul_precision": "high"}, "matmul_precision"),
    ):
        with pytest.raises(UserError, match=f"{named}.*--overwrite"):
            predict(workplace.change(**change), silent)
        assert workplace.snapshot() == before
    assert not any(r.kept for r in predict(workplace.change(recycles=1, seeds=1, overwrite=True), silent))


def test_changed_alignment_is_noticed(workplace, finished: Finished):
    """Catches results that are kept although an alignment has changed."""
    with (workplace.config.alignments / "alpha_A" / "uniref90_hits.a3m").open("a") as file:
        file.write(f">more\n{QUERY}\n")
    found = predict_records(workplace.config, silent)
    assert [(result.name, result.kept) for result in found.results] == [("beta_A", True)]
    assert "alignments" in found.failures[0].reason
    output = workplace.config.output  # the table and the page hold no result of the alignment as it was
    assert [line.split(",")[0] for line in (output / "predictions.csv").read_text().splitlines()] == [
        "target",
        "beta_A",
        "beta_A",
    ]
    assert [line.count("alpha_A/report.html") for line in [(output / "index.html").read_text()]] == [0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"msa_clusters": 1}, "msa_clusters is 1, but must be above max_templates, which is 1"),
        ({"fasta": "absent.fasta"}, r"absent\.fasta: no such file or folder"),
        ({"alignments": "absent"}, "absent: no such folder of alignments"),
        ({"device": "quantum"}, "--device is 'quantum'"),
        ({}, r"'alpha_A' is empty.*None of the 2 records can be predicted"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(workplace, monkeypatch, change, said):
    """Catches an error that is found only after the model ran on a target, and files that it leaves."""
    if not change:
        workplace.config.fasta.write_text(">alpha_A\n>gamma_A\nXXXX\n")
    before = workplace.snapshot()
    monkeypatch.setattr(seeds, "run_passes", lambda *_: pytest.fail("the model ran before the inputs were checked"))
    paths = {name: workplace.root / value for name, value in change.items() if name in ("fasta", "alignments")}
    with pytest.raises(UserError, match=said) as caught:
        predict(workplace.change(**change | paths), silent)
    assert "\n" not in str(caught.value)
    assert workplace.snapshot() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seeds": 0}, "--seeds is 0"),
        ({"recycles": -1}, "--recycles is -1"),
        ({"msa_clusters": 0}, "--msa_clusters is 0"),
        ({"ensembles": 0}, "--ensembles is 0"),
        ({"stop_tolerance": -0.5}, "--stop_tolerance is -0.5"),
        ({"stop_tolerance": float("nan")}, "--stop_tolerance is nan"),
        *(({"working_memory": value}, "--working_memory is '.*', but must be a size such as 512MB")
          for value in ("", "8", "0GB", "8 gigabytes")),
        ({"kernels": KernelsConfig(attention="chunkd")}, r"kernels\.attention is 'chunkd'.*Did you mean 'chunked'"),
        ({"matmul_precision": "medium"}, "--matmul_precision.*medium.*highest or high"),
        ({"save": "pairs"}, "--save: no array 'pairs'.*pair.*There are single, .*structure_module"),
        ({"save": ""}, "--save: no array ''"),
        ({"save": "pair", "save_passes": "first"}, "--save_passes is 'first', but must be last or all"),
        ({"save_dtype": "float16"}, "--save_dtype is given without --save"),
        ({"save": "pair", "save_dtype": "bfloat16"}, "which .npz files cannot hold; add --save_format safetensors"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(workplace, change, said):
    """Catches zero seeds (success without a file), bytes taken for gigabytes, torch's own "medium", which would multiply
    float32 matrices in bf16, and a misspelt backend that is found only after the alignments have been read."""
    with pytest.raises(UserError, match=said):
        workplace.change(**change)


@pytest.mark.verify_but("True-error0", "False-error1")
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("overwrite", [False, True])
def test_failure_while_writing_leaves_nothing_partial(workplace, predicted: Finished, monkeypatch, error, overwrite):
    """Catches partial folders, new parents or damaged older results after a full disk or Ctrl-C at the second structure."""
    if overwrite:
        predicted.copied(workplace.config.output)
    contents = {path: path.read_bytes() for path in workplace.root.rglob("*") if path.is_file()}
    before, written = workplace.snapshot(), []
    real = results.structure_text

    def fail_at_second(structure, *given):
        if written:
            raise error
        written.append(structure)
        return real(structure, *given)

    monkeypatch.setattr(results, "structure_text", fail_at_second)
    with pytest.raises((UserError, KeyboardInterrupt)):
        predict(workplace.change(overwrite=overwrite, recycles=1), silent)
    assert workplace.snapshot() == before
    assert {path: path.read_bytes() for path in contents} == contents


def test_raw_weights_are_another_model(workplace, checkpoint, tmp_path):
    """Catches --raw that does not reach the checkpoint reader."""
    workplace.only("beta_A")
    model = load_model(checkpoint)
    average = {name: 0.5 * value for name, value in model.state_dict().items() if value.is_floating_point()}
    save_model(tmp_path / "both.ckpt", model, average)
    config = workplace.change(checkpoint=tmp_path / "both.ckpt", seeds=1)
    averaged = predict(config, silent)[0]
    raw = predict(
        workplace.change(checkpoint=tmp_path / "both.ckpt", seeds=1, raw=True, output=tmp_path / "raw"), silent
    )[0]
    assert averaged.structure().read_bytes() != raw.structure().read_bytes()


def test_settings_reach_the_model(workplace, predicted: Finished, monkeypatch):
    """Catches --kernels, --working_memory, --matmul_precision or --format that is ignored, or that changes a structure, and a
    setting of the process that the next caller inherits."""
    seen, lines = [], []
    original = AlphaFold.one_pass

    def watched(model, *arguments, **options):
        evoformer = model.evoformer
        memory = evoformer.blocks[0].pair_stack.memory
        seen.append((evoformer.kernels.transition.__module__, memory, torch.get_float32_matmul_precision()))
        return original(model, *arguments, **options)

    monkeypatch.setattr(AlphaFold, "one_pass", watched)
    workplace.only("alpha_A")
    given = {"kernels": KernelsConfig(transition="reference"), "working_memory": "0.01MB", "matmul_precision": "high"}
    (result,) = predict(workplace.change(seeds=1, format="pdb", **given), lines.append)
    predict(workplace.change(seeds=1, output=workplace.root / "usual"), silent)
    assert seen[0] == ("evodsp.model.kernels.reference", 10_000, "high")
    assert seen[1][1:] == (None, "highest"), "auto cuts nothing that fits whole"
    assert torch.get_float32_matmul_precision() == "highest"
    assert any(line.endswith("reference (asked for) for transition") for line in lines)
    found, expected = read_chain(result.structure(), "A"), read_chain(predicted.results[0].structure(0), "A")
    assert found.sequence == expected.sequence == QUERY
    np.testing.assert_allclose(found.positions, expected.positions, rtol=0, atol=1.5e-3)  # files have three decimals


def test_half_precision_is_the_same_prediction_up_to_rounding(workplace, predicted: Finished):
    """Catches --precision that is ignored, and outputs that bf16 rounds away: positions have digits below 1/8 Å."""
    workplace.only("alpha_A")
    config = workplace.change(seeds=1, output=workplace.root / "half", precision="bf16")
    full, (half,) = predicted.results[0], predict(config, silent)
    assert half.mean_plddt[0] != full.mean_plddt[0]
    assert half.mean_plddt[0] == pytest.approx(full.mean_plddt[0], abs=2.0)
    positions = read_chain(half.structure(), "A").positions
    assert (np.abs(positions * 8 - np.round(positions * 8)) > 0.1).any()
    with pytest.raises(UserError, match="precision: bf16 there, None now"):
        predict(replace(config, precision="fp32"), silent)


def test_naming_a_gpu_does_not_touch_it(monkeypatch):
    """Catches a context on GPU 0 for every rank: a rank names its device before it has taken its own GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("auto", "cuda", "cuda:1"):  # on a machine without GPUs, touching one raises
        assert device_of(name).type == "cuda"
    with pytest.raises(UserError, match="'cuda:2', which PyTorch cannot use"):
        device_of("cuda:2")


def test_a_second_run_says_that_the_first_is_at_work(workplace: Workplace) -> None:
    """Catches two runs of one command, each of which removes what the other has not finished, and a run of other records in the
    same folder that is refused, or that says nothing of the first."""
    output, said = workplace.config.output, list[str]()
    with _alone(output, {"alpha_A", "beta_A"}, said.append):
        with pytest.raises(
            UserError, match=rf"--output {output}: process {os.getpid()} on .* predicts the same records there; "
        ):
            predict(workplace.config, silent)
        with _alone(output, {"gamma_A"}, said.append):
            pass
    assert [line.rpartition(" predicts ")[2] for line in said] == [f"into {output} too; its records must be others"]
    assert not output.exists()
    predict(workplace.config, silent)
    assert not list(output.glob(".predict*"))


USED = FeatureConfig(**{**vars(TRAINED), "crop_size": None, "uniform_recycling": False, "recycles": 1})


@pytest.fixture
def ptm_workplace(workplace: Workplace, ptm_checkpoint: Path) -> Workplace:
    """The two targets with this model. The sizes are those of training, but with one recycling iteration less."""
    return with_ptm(workplace, ptm_checkpoint)


def with_ptm(workplace: Workplace, ptm_checkpoint: Path) -> Workplace:
    change = {"checkpoint": ptm_checkpoint, "msa_clusters": None, "extra_msa": None, "recycles": 1}
    return Workplace(workplace.root, workplace.change(**change))


@pytest.fixture(scope="module")
def ptm_predicted(tmp_path_factory: pytest.TempPathFactory, ptm_checkpoint: Path) -> Finished:
    """A run in such a workplace, whose files no test changes."""
    return Finished.run(with_ptm(make_workplace(tmp_path_factory.mktemp("run"), ptm_checkpoint), ptm_checkpoint).config)


@pytest.fixture
def ptm_finished(ptm_workplace: Workplace, ptm_predicted: Finished) -> Finished:
    """As if the two targets had just been predicted in this workplace."""
    return ptm_predicted.copied(ptm_workplace.config.output)


def sample_of(workplace: Workplace, name: str, letters: str, seed: int = 0) -> Sample:
    """The features without templates."""
    query = ProteinSequence(name, letters)
    return prediction_sample(query, read_alignment_dir(workplace.config.alignments / name, query), USED, seed)


def masked_template(residues: int) -> Sample:
    """The features of one masked template, for two passes."""
    return {
        "template_aatype": torch.zeros(2, 1, residues, dtype=torch.int32),
        "template_all_atom_positions": torch.zeros(2, 1, residues, 37, 3),
        "template_all_atom_masks": torch.zeros(2, 1, residues, 37),
        "template_pseudo_beta": torch.zeros(2, 1, residues, 3),
        "template_pseudo_beta_mask": torch.zeros(2, 1, residues),
        "template_mask": torch.zeros(2, 1),
    }


def test_prediction_equals_the_model_run_by_hand(ptm_workplace, ptm_predicted: Finished):
    """Catches template features with wrong axes, and a PAE that is transposed, scaled wrongly or of another seed."""
    found = ptm_predicted.results
    model = load_model(ptm_workplace.config.checkpoint)
    for result, letters in zip(found, (QUERY, OTHER), strict=True):
        for seed in (0, 1):
            sample = sample_of(ptm_workplace, result.name, letters, seed) | masked_template(len(letters))
            with torch.no_grad():
                output = model(collate([sample]))
            chain = read_chain(result.structure(seed), "A")
            present = chain.mask > 0
            expected = output.structure.positions[0].numpy()
            np.testing.assert_allclose(chain.positions[present], expected[present], atol=1e-3)
            pae = compute_pae(output.logits["predicted_aligned_error"])[0].numpy()
            assert np.abs(pae - pae.T).max() > 0.1, "a transposed matrix must not pass"
            (written,) = read_json(result.folder / f"seed_{seed}_pae.json")
            assert list(written) == ["predicted_aligned_error", "max_predicted_aligned_error"]
            np.testing.assert_allclose(written["predicted_aligned_error"], pae, atol=0.006)
            assert written["max_predicted_aligned_error"] == 31.75
            scores = read_json(result.folder / f"seed_{seed}_scores.json")
            assert scores["max_pae"] == np.max(written["predicted_aligned_error"])
            assert scores["pae"] == written["predicted_aligned_error"]
            ptm = compute_ptm(output.logits["predicted_aligned_error"], torch.ones(1, len(letters))).item()
            assert scores["ptm"] == pytest.approx(ptm, abs=6e-4)
            assert 0 < ptm < 1


def test_files_of_a_model_with_the_head(ptm_workplace, ptm_finished: Finished):
    """Catches missing or superfluous files, a ranking without each seed's pTM, a log that hides that no templates were used,
    and a folder without its PAE file that counts as a finished run."""
    result = ptm_finished.results[0]
    assert sorted(p.name for p in result.folder.iterdir()) == [
        "ranking.json", "report.html", "seed_0.cif", "seed_0_contacts.npz", "seed_0_pae.json", "seed_0_scores.json",
        "seed_1.cif", "seed_1_contacts.npz", "seed_1_pae.json", "seed_1_scores.json", "timings.json",
    ]  # fmt: skip
    ranking = read_json(result.folder / "ranking.json")
    assert ranking["ranked_by"] == "mean pLDDT"
    for entry in ranking["ranking"]:
        scores = read_json(result.folder / f"seed_{entry['seed']}_scores.json")
        assert list(scores) == ["plddt", "max_pae", "pae", "ptm"]
        np.testing.assert_allclose(read_plddt(result.folder, entry["seed"]), scores["plddt"], atol=1e-4)
        assert entry["ptm"] == scores["ptm"]
        assert entry["mean_plddt"] == pytest.approx(np.mean(scores["plddt"]), abs=0.01)
    assert ptm_finished.lines.count("  templates: none") == 2
    assert any("pTM 0." in line for line in ptm_finished.lines)
    assert predict(ptm_workplace.config, silent)[0].kept
    (result.folder / "seed_0_pae.json").unlink()
    with pytest.raises(UserError, match=r"'seed_0_pae\.json' is missing"):
        read_result(result.folder)


def errors_in(path):
    """The aligned errors that python-modelcif reads from a file, by pairs of residue numbers."""
    with path.open(encoding="utf-8") as file:
        (system,) = modelcif.reader.read(file)
    (group,) = system.model_groups
    metrics = [metric for metric in group[0].qa_metrics if isinstance(metric, modelcif.qa_metric.LocalPairwise)]
    assert all(isinstance(metric, modelcif.qa_metric.PAE) for metric in metrics)
    return {(metric.residue1.seq_id, metric.residue2.seq_id): metric.value for metric in metrics}


def test_aligned_errors_in_model_cif(ptm_workplace, ptm_finished: Finished, monkeypatch):
    """Catches errors that are transposed, missing, written though nobody asked, or not added to a finished prediction."""
    result = ptm_finished.results[0]
    assert errors_in(result.structure(0)) == {}
    without = result.structure().read_text()
    monkeypatch.setattr("evodsp.inference.jobs.load_model", lambda *_: pytest.fail("the model was loaded"))
    (added, *_) = predict(replace(ptm_workplace.config, pae_in_cif=True), silent)
    pae = read_json(result.folder / "seed_0_pae.json")[0]["predicted_aligned_error"]
    found = errors_in(added.structure(0))
    assert len(found) == len(QUERY) ** 2
    assert found[2, 5] == pytest.approx(pae[1][4], abs=0.006)
    assert found[5, 2] == pytest.approx(pae[4][1], abs=0.006)
    assert len({round(value, 2) for value in found.values()}) > 2
    one = Prediction.read(result.folder)
    assert one.to_cif() == without
    assert one.to_cif(pae=True) == added.structure().read_text()
    assert predict(replace(ptm_workplace.config, pae_in_cif=True), silent)[0].kept
    assert errors_in(predict(ptm_workplace.config, silent)[0].structure(0)) == found, "they stay"
    with pytest.raises(UserError, match="--pae_in_cif is given with --format pdb"):
        replace(ptm_workplace.config, pae_in_cif=True, format="pdb")


def test_ranking_of_chains_is_by_plddt_where_ptm_disagrees(tmp_path):
    """Catches a ranking by pTM: AlphaFold and ColabFold rank single chains by pLDDT, those of models with pTM, too."""
    aatype, mask = np.zeros(3, np.int32), np.zeros((3, 37), np.float32)
    mask[:, :5] = 1

    def prediction(plddt: float, ptm: float) -> PredictedStructure:
        error = AlignedError(np.full((3, 3), 4.256, np.float32), 31.75, ptm)
        confidence = np.full(3, plddt, np.float32)
        return PredictedStructure("x", aatype, np.zeros((3, 37, 3), np.float32), mask, confidence, aligned_error=error)

    result = write_results(tmp_path, {0: prediction(50, 0.9), 1: prediction(60, 0.2)}, "cif", {}, "x")
    assert result.best == 1
    assert [entry["ptm"] for entry in read_json(tmp_path / "ranking.json")["ranking"]] == [0.2, 0.9]
    expected = '[{"predicted_aligned_error":[[4.26,4.26,4.26],[4.26,4.26,4.26],[4.26,4.26,4.26]],'
    assert (tmp_path / "seed_1_pae.json").read_text() == expected + '"max_predicted_aligned_error":31.75}]\n'
