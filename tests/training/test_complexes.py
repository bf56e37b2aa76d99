"""Runs of `evodsp fit` on complexes."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import gemmi
import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig, ModelConfig
from evodsp.data.complexes.pairing import BY_ENTRY
from evodsp.data.formats.mmcif import read_structure
from evodsp.data.samples.dataset import SampleDataset
from evodsp.data.samples.selection import DISTILLED
from evodsp.data.sources.opening import ComplexFiles
from evodsp.errors import UserError
from evodsp.geometry.residues import CA
from evodsp.inference.score.table import columns_of
from evodsp.parallel.exchange import LocalExchange
from evodsp.report.runs import read_curve
from evodsp.training.chains import ChainDataModule, find_chains
from evodsp.training.config import DataConfig, DistillationConfig, check_samples
from evodsp.training.scores import known_scores, mean_scores, score, score_table, write_scores
from evodsp.weights.checkpoint import read_checkpoint
from tests.builders.complex_files import STRUCTURES, write_complex, write_shortened
from tests.builders.labelled_batch import leaves_of, output_of
from tests.builders.training import NO_VALIDATION

CONFIG = """
model:
  preset: test
  arrangement: multimer
  structure_module: {position_scale: 20.0, scalar_bias: false}
  extra_msa: {blocks: 0}
  templates: {enabled: true, channels: 6, blocks: 1, pair_heads: 2, pair_head_width: 3, triangle_channels: 5, checkpoint: false}
  loss: {interface_fape: 0.5, chain_centre: 1.0}
  optimizer: {warmup_samples: 2, lr: 1.0e-3}
data:
  train_chains: [1abc]
  validation_chains: [1abc]
  samples_per_epoch: 4
  template_chains: [1abc, 2abc]
  template_max_identity: 1.0
  train: {crop_size: 32, msa_clusters: 5, extra_msa: 2, max_templates: 2, recycles: 1}
  validation: {crop_size: 48, msa_clusters: 5, extra_msa: 2, max_templates: 2, recycles: 0, uniform_recycling: false}
trainer: {accelerator: cpu, gradient_clip_val: 0.1, log_every_n_steps: 1, max_steps: 4, enable_progress_bar: false}
"""
"""One thing for each kind of sample: two crops in four are spatial, chains A and B are copies, and all have templates."""


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    alignments, structures = write_complex(tmp_path)
    write_shortened(structures, "2abc", 6)
    return DataConfig(alignment_dir=str(alignments), structure_dir=str(structures))


def words(folder: Path, output: str, *options: str) -> list[str]:
    config = folder / "complexes.yaml"
    folders = f"data:\n  alignment_dir: {folder}/alignments\n  structure_dir: {folder}/mmcif_files\n"
    config.write_text(CONFIG.replace("data:\n", folders))
    return ["fit", f"--config={config}", f"--output={folder}/{output}", *options]


def test_a_run_on_a_complex_and_its_second_half(
    data: DataConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches a setting, an entry or a term of the loss that a run lacks, templates that are not found, not said or not learnt
    from, and a resumed run that goes on otherwise."""
    assert main(words(tmp_path, "whole")) == 0
    log = capfd.readouterr().err
    assert "templates of 1abc_A: 1 template of 2 hits; 1 hit: too few residues (2abc_C)" in log
    assert "templates of 1abc_C: 2 templates of 2 hits" in log
    assert "templates of 1abc_B" not in log
    assert main(words(tmp_path, "halves", "--trainer.max_steps=2", NO_VALIDATION)) == 0
    assert main(words(tmp_path, "halves", "--ckpt_path=auto", NO_VALIDATION)) == 0
    curve = read_curve(tmp_path / "whole" / "curve.csv")
    assert all(float(curve[step]["train/interface_fape"]) > 0 for step in range(4))
    assert float(curve[3]["val/lddt_ca"]) > 0
    first, second = (read_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("whole", "halves"))
    embedding = (
        "model.template_embedder.distances.weight"  # absent templates have no distances, so no gradient reaches it
    )
    assert not torch.equal(first["state_dict"][embedding], first["ema_state_dict"][embedding])
    for name, weight in first["state_dict"].items():
        assert torch.equal(weight, second["state_dict"][name]), name


@pytest.mark.verify
def test_the_order_of_copies_in_a_file_does_not_matter(tmp_path: Path) -> None:
    """Catches a step or a validation whose losses compare a predicted chain with the true chain of its name."""
    curves = []
    for places in ("ABC", "BAC"):
        folder = tmp_path / places
        folder.mkdir()
        write_shortened(write_complex(folder, places)[1], "2abc", 6)
        assert main(words(folder, "run", "--trainer.max_steps=1", "--data.train.spatial_crop_fraction=0")) == 0
        curves.append(read_curve(folder / "run" / "curve.csv")[0])
    for name in ("train/loss", "train/interface_fape", "train/lddt_ca", "val/loss", "val/rmsd"):
        assert float(curves[1][name]) == pytest.approx(float(curves[0][name]), rel=1e-5), name


@pytest.mark.verify
@pytest.mark.filterwarnings("ignore:Error detected")  # the anomaly that it finds
def test_a_complex_is_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a replay that lacks a term of the loss, or compares a predicted chain with the true chain of its name."""
    found = []
    for places in ("ABC", "BAC"):
        folder = tmp_path / places
        folder.mkdir()
        write_complex(folder, places)
        broken = ("--model.loss.torsion=1e39", "--trainer.max_steps=1", "--data.train.spatial_crop_fraction=0")
        assert main(words(folder, "run", *broken)) == 2
        capsys.readouterr()
        assert main(["replay", str(folder / "run" / "replays" / "sample_0.pt"), "--device=cpu"]) == 1
        lines = capsys.readouterr().out.splitlines()
        found.append([line for line in lines if line.startswith(("interface_fape", "chain_centre", "backbone_fape"))])
    assert len(found[0]) == 3
    assert found[0] == found[1]


@pytest.mark.verify
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_a_complex(data: DataConfig, tmp_path: Path, ranks: int) -> None:
    """Catches a part of a step on complexes that several ranks compute otherwise than one."""
    double = "--trainer.precision=64-true"
    assert main(words(tmp_path, "one", double)) == 0
    assert main(words(tmp_path, "more", double, f"--trainer.devices={ranks}", f"--parallel.sequence={ranks}")) == 0
    one, more = (read_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("one", "more"))
    for name, weight in one["state_dict"].items():
        torch.testing.assert_close(more["state_dict"][name], weight, rtol=0, atol=1e-9, msg=name)


def test_the_entries_of_a_run(data: DataConfig) -> None:
    """Catches entries that are looked up as chains, and settings that do not reach the source."""
    found = find_chains(dataclasses.replace(data, pairing="entry", assembly=None), arrangement="multimer")
    assert found.train == ["1abc"]
    assert isinstance(found.store, ComplexFiles)
    assert (found.store.rule, found.store.assembly) == (BY_ENTRY, None)
    missing = dataclasses.replace(data, train_chains=["1abc", "2abc"], validation_chains=["1abd"])
    with pytest.raises(UserError, match=r"no alignments of a chain of the complex '1abd'.*Did you mean '1abc'"):
        find_chains(missing, arrangement="multimer")
    left = find_chains(dataclasses.replace(missing, validation_chains=None), arrangement="multimer")
    assert (left.train, left.missing) == (["1abc"], {"2abc": "alignments"})


def test_scores_of_interfaces(tmp_path: Path) -> None:
    """Catches the score of an interface that counts distances within chains, or stands for all in a mean although a complex has
    none, or that the file lacks."""
    true = 8.0 * torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.0, 0.0])
    near = torch.stack([true, true])
    moved = near.clone()
    moved[0, 3:] += torch.tensor([0.0, 20.0, 0.0])  # one chain away from the other
    chain = torch.tensor([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1]])
    leaves = {**leaves_of(2, 6), "positions": torch.zeros(2, 6, 37, 3)}
    leaves["positions"][:, :, CA] = moved
    labels = {"all_atom_positions": torch.zeros(2, 6, 37, 3), "all_atom_mask": torch.ones(2, 6, 37)}
    labels["all_atom_positions"][:, :, CA] = near
    found = score(output_of(leaves, LocalExchange()), labels | {"asym_id": chain[:, None]})
    assert found["interface_lddt_ca"][0] == 0
    assert found["lddt_ca"][0] > 0.5
    rows = {name: known_scores({key: float(value[k]) for key, value in found.items()}) for k, name in enumerate("ab")}
    assert "interface_lddt_ca" not in rows["b"]
    assert mean_scores(rows)["interface_lddt_ca"] == 0
    assert " - " in f"{score_table(rows).splitlines()[2]} "
    counts = {"residues": 6.0, "resolved": 6.0}
    write_scores({name: row | counts for name, row in rows.items()}, "test", tmp_path / "test.csv")
    a, b = csv.DictReader((tmp_path / "test.csv").open())
    assert [*a] == ["chain", *columns_of("chains")[1:], "interface_lddt_ca"]
    assert (a["interface_lddt_ca"], b["interface_lddt_ca"], b["residues"]) == ("0.0", "", "6")


@pytest.mark.parametrize(
    ("setting", "given"),
    [
        ("pairing", {"pairing": "entry"}),
        ("assembly", {"assembly": None}),
        ("train.spatial_crop_fraction", {"train": FeatureConfig(spatial_crop_fraction=0.3)}),
    ],
)
def test_settings_that_samples_do_not_have(setting: str, given: dict[str, Any]) -> None:
    """Catches a setting of complexes that a run on single chains ignores without a word."""
    check_samples(ModelConfig(), DataConfig())
    check_samples(ModelConfig(arrangement="multimer"), DataConfig(**given))
    with pytest.raises(UserError, match=rf"data\.{setting} is .*monomer"):
        check_samples(ModelConfig(), DataConfig(**given))


UNSURE = 10


def predictions(folder: Path) -> DistillationConfig:
    """Predicted structures of 1abc, with the first residues of its chain A below a pLDDT of 50, and of s001, a single chain."""
    folder.mkdir()
    alignments, structures = write_complex(folder)
    (structures / "s001.cif").write_bytes((STRUCTURES / "s001.cif").read_bytes())
    (own := alignments / "s001_A").mkdir()
    letters = read_structure(structures / "s001.cif").chains["A"].sequence
    (own / "family.a3m").write_text("".join(f">row{n}\n{'W' * n}{letters[n:]}\n" for n in range(8)))
    for entry in ("1abc", "s001"):
        model = gemmi.read_structure(str(structures / f"{entry}.cif"))
        for chain in model[0]:
            for number, residue in enumerate(chain):
                for atom in residue:
                    atom.b_iso = 49.0 if entry == "1abc" and chain.name == "A" and number < UNSURE else 90.0
        model.make_mmcif_document().write_file(str(structures / f"{entry}.cif"))
    return DistillationConfig(str(alignments), str(structures), fraction=0.5, max_msa_rows=4)


@pytest.mark.verify
def test_a_multimer_trains_on_predictions_too(
    data: DataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches predicted complexes, or single chains among them, that a multimer does not take; residues of a low pLDDT that are
    learnt from; rows above the limit; and a store of them that gives other samples."""
    of_files = predictions(tmp_path / "predicted")
    roots = [f"--{name}={getattr(of_files, name)}" for name in ("alignment_dir", "structure_dir")]
    store = tmp_path / "store"
    built = ["--complexes=true", "--min_plddt=50", "--workers=1", f"--output={store}"]
    assert main(["data", "build", *roots, *built]) == 0
    features = FeatureConfig(crop_size=None, msa_clusters=4, extra_msa=4, recycles=0)
    names, both = [f"{DISTILLED}1abc", f"{DISTILLED}s001"], []
    for given in (of_files, DistillationConfig(store=str(store), fraction=0.5, max_msa_rows=4)):
        found = find_chains(dataclasses.replace(data, train=features, distillation=given), arrangement="multimer")
        assert found.distilled == names
        samples = ChainDataModule(dataclasses.replace(data, train=features), found)._samples(["1abc"], features, True)
        both.append([samples.make(3, name) for name in names])
    for one, other in zip(*both, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    of_complex, of_chain = both[0]
    ca = of_complex["all_atom_mask"][:, CA]
    assert not ca[:UNSURE].any()
    assert ca[UNSURE : 2 * UNSURE].all()
    assert of_chain["asym_id"].unique().tolist() == [1]
    assert [int(sample["msa_sizes"][0]) for sample in both[0]] == [4, 4]
    folders = (f"--data.distillation.{name}={getattr(of_files, name)}" for name in ("alignment_dir", "structure_dir"))
    assert main(words(tmp_path, "run", *folders, "--data.distillation.fraction=1.0", "--trainer.max_steps=1")) == 0
    capsys.readouterr()
    other = dataclasses.replace(data, assembly=None, distillation=DistillationConfig(store=str(store)))
    with pytest.raises(UserError, match=r"data\.distillation\.store is .*--assembly 1, but data\.assembly is null"):
        find_chains(other, arrangement="multimer")
    unmasked = tmp_path / "unmasked"
    assert main(["data", "build", *roots, "--complexes=true", "--workers=1", f"--output={unmasked}"]) == 0
    given = DistillationConfig(store=str(unmasked))
    with pytest.raises(UserError, match=r"was built without --min_plddt"):
        find_chains(dataclasses.replace(data, distillation=given), arrangement="multimer")


def test_filters_and_weights_of_complexes_from_a_cache(data: DataConfig, tmp_path: Path) -> None:
    """Catches a cache of chains whose facts do not reach their entries, and entries that are drawn as often as chains."""
    facts = {"release_date": "2001-01-01", "resolution": 2.0, "seq": "ACDE"}
    cache = {
        "1abc_A": {**facts, "cluster_size": 2},
        "1abc_B": {**facts, "cluster_size": 2},
        "1abc_C": {**facts, "cluster_size": 4},
        "2abc_A": {**facts, "resolution": 9.5, "cluster_size": 1},
        "3abc_A": {**facts, "cluster_size": -1},
    }
    (tmp_path / "cache.json").write_text(json.dumps(cache))
    for entry in ("2abc", "3abc"):
        (Path(data.structure_dir) / f"{entry}.cif").write_bytes((Path(data.structure_dir) / "1abc.cif").read_bytes())
        (own := Path(data.alignment_dir) / f"{entry}_A").mkdir()
        (own / "family.a3m").write_text(">a\nACDE\n")
    settings = dataclasses.replace(data, chain_data_cache=str(tmp_path / "cache.json"), sampling="alphafold2")
    settings = dataclasses.replace(settings, train_chains=["1abc", "2abc", "3abc"], max_quarantined=2)
    found = find_chains(settings, quarantined={"3abc"}, arrangement="multimer")
    assert found.train == ["1abc", "3abc"]
    assert found.weights is not None
    # 1/2 + 1/2 + 1/4, and 1/5: five chains have the sequence of the one without a cluster.
    assert found.weights.tolist() == pytest.approx([1.25, 0.2])


def test_settings_that_reach_samples_of_complexes(tmp_path: Path) -> None:
    """Catches a fraction of spatial crops, or an assumed resolution, that samples of complexes do not follow."""
    files, crops = ComplexFiles(*write_complex(tmp_path, apart=10.0)), {}
    for fraction in (0.0, 1.0):
        config = FeatureConfig(crop_size=32, msa_clusters=3, extra_msa=2, recycles=0, spatial_crop_fraction=fraction)
        samples = SampleDataset(files, ["1abc"], config, seed=0, training=True, assumed_resolution=2.5)
        found = [samples[index] for index in range(6)]
        crops[fraction] = torch.stack([sample["residue_index"][0] for sample in found])
        assert all(sample["resolution"] == 2.5 for sample in found)
    assert not torch.equal(crops[0.0], crops[1.0])
