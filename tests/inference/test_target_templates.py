"""predict --templates with real template searches, structures and alignments, and a tiny random model."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import gemmi
import numpy as np
import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig, ModelConfig
from evodsp.data.formats import parse_fasta
from evodsp.data.formats.mmcif import read_chain
from evodsp.data.records import ProteinSequence
from evodsp.data.samples.dataset import collate
from evodsp.data.sources.layout import read_alignment_dir
from evodsp.data.templates.features import TemplateFeatures
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import UserError
from evodsp.features.batch import prediction_sample
from evodsp.inference.config import TemplateSettings
from evodsp.inference.target_msas import find_templates, template_digest, template_source
from evodsp.inference.targets import Target
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import load_model, save_model
from evodsp.weights.command import randomise
from tests.builders.pages import last_options
from tests.builders.parameters import noisy
from tests.builders.templates import random_templates
from tests.builders.training_chains import SEQUENCES, write_chain

from .conftest import PTM

FEATURES = FeatureConfig(
    crop_size=None, msa_clusters=12, extra_msa=6, max_templates=4, recycles=1, uniform_recycling=False
)
NAME = "query73_A"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with random weights: with templates; with templates but max_templates 0 ("bare"); without templates."""
    folder = tmp_path_factory.mktemp("templates")
    paths = {}
    for name, templates, features in (
        ("with", True, FEATURES),
        ("bare", True, replace(FEATURES, max_templates=0, msa_clusters=8)),
        ("without", False, FEATURES),
    ):
        torch.manual_seed(0)
        model = noisy(AlphaFold(replace(PTM, templates=replace(PTM.templates, enabled=templates))))
        paths[name] = folder / f"{name}.ckpt"
        save_model(paths[name], model, features=features)
    return paths


def command(real_data: Path, checkpoint: Path, output: Path) -> list[str]:
    """The command line without templates."""
    return [
        "predict", "--fasta", str(real_data / "fasta" / "query73.fasta"), "--alignments", str(real_data / "alignments"),
        "--checkpoint", str(checkpoint), "--output", str(output), "--device", "cpu",
    ]  # fmt: skip


@pytest.fixture
def words(real_data: Path, tmp_path: Path, checkpoints: dict[str, Path]) -> list[str]:
    """The command line without templates."""
    return command(real_data, checkpoints["with"], tmp_path / "out")


@pytest.fixture(scope="module")
def templated(real_data: Path, tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Path:
    """The output of a run with templates. No test changes its files."""
    output = tmp_path_factory.mktemp("templated") / "out"
    templates = ["--templates", str(real_data / "mmcif_files")]
    assert main([*command(real_data, checkpoints["with"], output), *templates]) == 0
    return output


def settings(folder: Path) -> dict:
    """The settings in the target's ranking.json."""
    return json.loads((folder / NAME / "ranking.json").read_text())["settings"]


def test_templates_reach_the_model(words, real_data, tmp_path, capsys, checkpoints, templated):
    """Catches templates that are not used, not the best four of seven, or not reported; a missing structure must be named."""
    structures = real_data / "mmcif_files"
    log = (templated / "predict.log").read_text()
    (line,) = re.findall(r"  templates: .*$", log, re.MULTILINE)
    assert line.startswith("  templates: 7 templates of 10 hits; ")
    assert "1 hit: no structure (1hf9_B)" in line

    timings = json.loads((templated / NAME / "timings.json").read_text())
    assert (timings["residues"], timings["alignment_rows"]) == (73, 1140)

    (query,) = parse_fasta(real_data / "fasta" / "query73.fasta")
    folder = real_data / "alignments" / NAME
    found = TemplateSource.open(structures).find(folder, query)
    used = list(found.features.names[:4])
    assert line.endswith(f"; the best 4 are used: {', '.join(used)}")
    assert settings(templated)["templates"] == used

    sample = prediction_sample(query, read_alignment_dir(folder, query), FEATURES, 0, found.features)
    assert sample["template_mask"].tolist() == [[1] * 4] * 2
    with torch.no_grad():
        output = load_model(checkpoints["with"])(collate([sample]))
    chain = read_chain(templated / NAME / "seed_0.cif", "A")
    present = chain.mask > 0
    np.testing.assert_allclose(chain.positions[present], output.structure.positions[0].numpy()[present], atol=1e-3)

    assert main(last_options([*words, "--output", str(tmp_path / "none")])) == 0
    assert "  templates: none\n" in capsys.readouterr().out
    assert settings(tmp_path / "none")["templates"] == []
    other = tmp_path / "none" / NAME / "seed_0.cif"
    assert other.read_bytes() != (templated / NAME / "seed_0.cif").read_bytes()


@pytest.mark.verify
def test_other_templates_are_another_question(words, real_data, tmp_path, capsys, templated):
    """Catches results kept despite no templates, an earlier date or a changed structure.

    The same structures in another folder count as the same templates.
    """
    structures = tmp_path / "structures"
    shutil.copytree(real_data / "mmcif_files", structures)
    shutil.copytree(templated, tmp_path / "out")
    assert main([*words, "--templates", str(structures), "--max_template_date", "2026-01-01"]) == 0
    assert "kept:" in capsys.readouterr().out
    first = settings(tmp_path / "out")["templates"][0]
    for change in ([], ["--templates", str(structures), "--max_template_date", "2009-06-30"]):
        assert main([*words, *change]) == 2
        error = capsys.readouterr().err
        assert "holds results of another run (templates: " in error
        assert error.count("\n") == 1
    path = structures / f"{first.split('_')[0]}.cif"
    text = path.read_text()
    moved = re.sub(
        r"(?m)^(ATOM .*? )(-?\d+)(\.\d{3} +-?\d+\.\d{3} +-?\d+\.\d{3} )", lambda m: f"{m[1]}{int(m[2]) + 1}{m[3]}", text
    )
    assert moved != text
    path.write_text(moved)
    assert main([*words, "--templates", str(structures)]) == 2
    assert "(templates_digest: " in capsys.readouterr().err


@pytest.mark.verify
def test_of_several_models_those_with_templates_use_them(words, real_data, tmp_path, checkpoints):
    """Catches AlphaFold2's five models of a kind refused with templates, because only two of them take some."""
    assert (
        main([*words, "--checkpoint", str(checkpoints["without"]), "--templates", str(real_data / "mmcif_files")]) == 0
    )
    models = json.loads((tmp_path / "out" / NAME / "ranking.json").read_text())["models"]
    assert {name: len(made_with["templates"]) for name, made_with in models.items()} == {"with": 4, "without": 0}


def test_no_room_for_templates_is_a_masked_template(words, real_data, tmp_path, capsys, checkpoints):
    """Catches --templates silently ignored by a model with max_templates 0, one that differs from a model with masked
    templates, or that loses MSA rows."""
    words, structures = last_options([*words, "--checkpoint", str(checkpoints["bare"])]), real_data / "mmcif_files"
    assert main([*words, "--templates", str(structures)]) == 2
    assert (
        f"bare.ckpt: its model takes no templates, but --templates {structures} is given; " in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
    assert main(words) == 0
    (query,) = parse_fasta(real_data / "fasta" / "query73.fasta")
    alignments = read_alignment_dir(real_data / "alignments" / NAME, query)
    sample = prediction_sample(
        query, alignments, FEATURES, 0
    )  # 12 clusters minus 4 template rows are 8 rows, as without templates
    with torch.no_grad():
        output = load_model(checkpoints["bare"])(collate([sample]))
    chain = read_chain(tmp_path / "out" / NAME / "seed_0.cif", "A")
    present = chain.mask > 0
    np.testing.assert_allclose(chain.positions[present], output.structure.positions[0].numpy()[present], atol=2e-3)


def test_the_fingerprint_covers_templates_of_all_chains() -> None:
    """Catches a result that is kept although the structure of a template of another chain has changed."""
    first, second = random_templates(2, 4), random_templates(1, 5)
    moved = replace(second, positions=second.positions + 1)
    digest = template_digest({"AAAA": first, "CCCCC": second})
    assert digest != template_digest({"AAAA": first, "CCCCC": moved})
    assert digest != template_digest({"AAAA": first})
    none = {letters: TemplateFeatures.none(len(letters)) for letters in ("AAAA", "CCCCC")}
    assert template_digest(none) == ""


def test_what_becomes_of_a_search(real_data: Path, tmp_path: Path) -> None:
    """Catches a date that excludes all templates and fails, a missing search result that is not said, and a truncated one that
    is read as one with fewer hits."""
    (query,) = parse_fasta(real_data / "fasta" / "query73.fasta")
    shutil.copytree(real_data / "alignments" / NAME, folder := tmp_path / NAME)
    target = Target(query, folder)

    def said(latest: date | None = None) -> str:
        source = template_source(TemplateSettings(real_data / "mmcif_files", latest, None, None))
        return find_templates(source, target, 4)[1][0]

    line = said(date(1980, 1, 1))
    assert line.startswith("templates: 0 templates of 10 hits; ")
    assert "released too late" in line
    assert line.endswith("; none is used")
    (path,) = folder.glob("*.hhr")
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match=f"{path}:"):
        said()
    path.unlink()
    none = "templates: none; no search result (.hhr, hmm_output.sto, hmmsearch_output.sto or pdb_hits.sto) in"
    assert said() == f"{none} {folder}"


def test_templates_without_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a list of template chains that is not used, hits that need a folder of alignments, and wrong names."""
    for key, letters in SEQUENCES.items():
        write_chain(tmp_path, key, letters)
    listed = tmp_path / "train.txt"
    listed.write_text("\n".join(SEQUENCES))
    structures = tmp_path / "mmcif_files"
    source = template_source(TemplateSettings(structures, None, None, listed))
    target = Target(ProteinSequence("new", "KTAYIAKERWL"), None)
    templates, (line,) = find_templates(source, target, 4)
    assert templates[target.sequence].names == ("1abc_A",)
    assert line.endswith("the best 1 are used: 1abc_A")
    listed.write_text("1abc_A\n9abc_A\n")
    with pytest.raises(UserError, match="9abc"):
        template_source(TemplateSettings(structures, None, None, listed))
    words = ["predict", "--fasta", "x.fasta", "--checkpoint", "x", "--output", "y", "--template_chains", str(listed)]
    assert main(words) == 2
    assert "--template_chains is given without --templates" in capsys.readouterr().err
    assert main([*words, "--templates", str(structures), "--max_template_date", "2020-01-01"]) == 2
    assert "--max_template_date is given, but --template_chains names the templates" in capsys.readouterr().err


@pytest.mark.verify
def test_predicts_from_real_alignments(real_data: Path, tmp_path: Path) -> None:
    """Catches real files that the readers refuse, alignments that are not merged, and an incomplete chain. (A smaller one:
    `test_templates_reach_the_model`.)"""
    torch.manual_seed(0)
    features = FeatureConfig(crop_size=None, msa_clusters=64, extra_msa=128, recycles=1)
    save_model(tmp_path / "small.ckpt", AlphaFold(ModelConfig.preset("small")), features=features)
    data = {"fasta": "fasta/6kwc.fasta", "alignments": "alignments/6KWC_1"}
    words = [f"--{name}={real_data / place}" for name, place in data.items()]
    assert main(["predict", *words, f"--checkpoint={tmp_path / 'small.ckpt'}", f"--output={tmp_path / 'out'}"]) == 0
    timings = json.loads((tmp_path / "out" / "6KWC_1" / "timings.json").read_text())
    assert (timings["residues"], timings["alignment_rows"]) == (191, 1929)
    chain = gemmi.read_structure(str(tmp_path / "out" / "6KWC_1" / "seed_0.cif"))[0][0]
    assert len(chain) == 191
    assert all(residue.find_atom("CA", "*") for residue in chain)


@pytest.mark.verify
def test_two_ranks_predict_the_structures_that_one_process_does(real_data: Path, tmp_path: Path) -> None:
    """At AlphaFold2's widths, in float32, with query73_A's templates and recycling: within the last digit of the files."""
    config = ModelConfig.preset("model_1_ptm")
    two_blocks = {name: dataclasses.replace(getattr(config, name), blocks=2) for name in ("evoformer", "extra_msa")}
    model = AlphaFold(dataclasses.replace(config, **two_blocks))
    randomise(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)  # larger ones amplify the rounding of float32 without end
    features = FeatureConfig(crop_size=None, msa_clusters=64, extra_msa=128, recycles=1, max_templates=4)
    save_model(tmp_path / "wide.ckpt", model, features=features)
    data = {"alignments": "alignments", "templates": "mmcif_files"}
    words = [str(real_data / "fasta"), *(f"--{name}={real_data / folder}" for name, folder in data.items())]
    for ranks in ("1", "2"):
        options = [
            f"--checkpoint={tmp_path / 'wide.ckpt'}",
            f"--output={tmp_path / ranks}",
            f"--parallel.sequence={ranks}",
        ]
        command = [sys.executable, "-m", "evodsp", "predict", *words, *options]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    log = (tmp_path / "2" / "predict.log").read_text()
    assert "the best 4 are used: 3u8v_A, 2crb_A, 4zey_A, 1psm_A" in log
    for name in ("6KWC_1", "query73_A"):
        alone, both = (
            np.array([atom.atom.pos.tolist() for atom in gemmi.read_structure(str(file))[0].all()])
            for file in (tmp_path / ranks / name / "seed_0.cif" for ranks in ("1", "2"))
        )
        assert alone.shape == both.shape
        assert np.ptp(alone) > 10  # a structure, not a point
        assert np.abs(alone - both).max() < 1.5e-3  # files have three decimals
