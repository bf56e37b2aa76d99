"""Models with the PAE head and with templates: their additional files, and predictions without templates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import modelcif.model
import modelcif.qa_metric
import modelcif.reader
import numpy as np
import pytest
import torch

from evodsp.config import FeatureConfig
from evodsp.data.formats.mmcif import read_chain
from evodsp.data.records import ProteinSequence
from evodsp.data.samples.dataset import Sample, collate
from evodsp.data.sources.layout import read_alignment_dir
from evodsp.errors import UserError
from evodsp.features.batch import prediction_sample
from evodsp.inference.predict import predict
from evodsp.inference.prediction import Prediction
from evodsp.inference.results import read_plddt, read_result, write_results
from evodsp.inference.structure_files import AlignedError, PredictedStructure
from evodsp.model.heads import compute_pae, compute_ptm
from evodsp.weights.checkpoint import load_model
from tests.builders.prediction import read_json, silent

from .conftest import OTHER, QUERY, TRAINED, Finished, Workplace, make_workplace

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
