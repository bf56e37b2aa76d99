"""Training with templates: from search results to a step, and settings that do not go together."""

from __future__ import annotations

import dataclasses
import shutil
from datetime import date
from pathlib import Path

import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig, ModelConfig, TemplateConfig
from evodsp.errors import UserError
from evodsp.features.batch import with_features
from evodsp.model.alphafold import TEMPLATE_FEATURES
from evodsp.report.runs import read_curve
from evodsp.training.chains import ChainDataModule, find_chains
from evodsp.training.config import DataConfig, check_templates
from evodsp.weights.checkpoint import read_checkpoint
from tests.builders.training_chains import SEQUENCES, write_chain

TEMPLATES = """
  templates: {enabled: true, channels: 4, blocks: 1, pair_heads: 1, pair_head_width: 2, triangle_channels: 3,
    transition_factor: 1, attention_heads: 1, attention_head_width: 2, checkpoint: false}
"""
HIT = "# STOCKHOLM 1.0\n2abc_B/1-13  GSHMDERVTCNPF\n1abc_A/1-13  MKTAYIAKQRWLE\n9abc_A/1-13  MKTAYIAKQRWLV\n//\n"


@pytest.fixture(scope="module")
def searched(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two chains; 1abc_A's template search found 2abc_B, itself, and an entry that is not there."""
    folder = tmp_path_factory.mktemp("searched")
    for name in ("alignments", "mmcif_files"):
        shutil.copytree(chains / name, folder / name)
    (folder / "alignments" / "1abc_A" / "hmm_output.sto").write_text(HIT)
    (folder / "mmcif_cache.json").write_text('{"2abc": {"release_date": "2001-01-01"}}')
    text = (chains / "tiny.yaml").read_text().replace(str(chains), str(folder)).replace("\ndata:", TEMPLATES + "data:")
    text = text.replace("msa_clusters: 4,", "msa_clusters: 6, max_templates: 2,").replace(
        "data:\n", f"data:\n  template_structure_dir: {folder}/mmcif_files\n  max_template_date: 2100-01-01\n"
    )
    (folder / "tiny.yaml").write_text(text)
    return folder


@pytest.mark.verify
def test_a_run_with_templates(searched: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches a template branch that gets no features, no gradient, or templates that the user cannot see in the log."""
    output = tmp_path / "run"
    options = ["--output", str(output), "--trainer.max_steps", "16", "--trainer.limit_val_batches", "0"]
    assert main(["fit", "--config", str(searched / "tiny.yaml"), *options]) == 0
    log = capfd.readouterr().err
    expected = (
        "templates of 1abc_A: 1 template of 3 hits; 1 hit: the query's own entry (1abc_A); 1 hit: no structure (9abc_A)"
    )
    assert expected in log
    assert "templates of 2abc_B: 0 templates of 0 hits" in log
    assert len(read_curve(output / "curve.csv")) == 16
    checkpoint = read_checkpoint(output / "checkpoints" / "last.ckpt")
    raw, average = checkpoint["state_dict"], checkpoint["ema_state_dict"]
    first = "model.template_embedder.embedding.weight"  # the first layer: what moves it has come through all others
    assert not torch.equal(raw[first], average[first]), "the loss does not reach the templates"


def data_config(searched: Path, **changes) -> DataConfig:
    folders = {"alignment_dir": str(searched / "alignments"), "structure_dir": str(searched / "mmcif_files")}
    with_templates = FeatureConfig(crop_size=10, msa_clusters=6, extra_msa=3, max_templates=2, recycles=0)
    defaults = {
        "template_structure_dir": str(searched / "mmcif_files"), "max_template_date": "2100-01-01", "samples_per_epoch": 6,
        "train": with_templates, "validation": with_templates, "validation_chains": list(SEQUENCES),
        "train_chains": list(SEQUENCES),
    }  # fmt: skip
    return DataConfig(**folders, **{**defaults, **changes})


def test_batches_hold_the_templates(searched: Path) -> None:
    """Catches the source opened but not handed to the samples, and its date limit lost on the way."""
    config = data_config(searched)
    chains = find_chains(config)
    module = ChainDataModule(config, chains)
    assert chains.templates is not None
    assert chains.templates.limits.max_date == date(2100, 1, 1)
    masks = [batch["template_mask"] for batch in module.val_dataloader()]
    assert [mask[0, 0].tolist() for mask in masks] == [[1, 0], [0, 0]]
    train = next(iter(module.train_dataloader()))
    assert train["template_aatype"].shape == (1, 1, 2, 10)


def test_templates_are_the_same_memory_in_all_passes(searched: Path) -> None:
    """Catches templates that are copied for each pass, whose torsions the model would make in each pass."""
    config = data_config(searched)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, recycles=3))
    module = ChainDataModule(config, find_chains(config))
    made = [with_features(batch, config.train) for batch in module.train_dataloader()]
    several = [batch for batch in made if batch["aatype"].shape[1] > 1]
    assert several
    for batch in several:
        assert all(batch[name].stride(1) == 0 for name in TEMPLATE_FEATURES)
        assert batch["template_all_atom_positions"].dtype == torch.float32  # what bf16-mixed and 32-true leave as it is


def test_without_a_folder_templates_are_masked(searched: Path) -> None:
    """Catches a model with templates that cannot be trained on chains without any."""
    config = data_config(searched, template_structure_dir=None, max_template_date=None)
    module = ChainDataModule(config, find_chains(config))
    batch = next(iter(module.train_dataloader()))
    assert batch["template_mask"].shape == (1, 1, 2)
    assert not batch["template_mask"].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template_structure_dir": "nowhere"}, r"data\.template_structure_dir is nowhere, which is not a folder"),
        ({"max_template_date": "tomorrow"}, r"data\.max_template_date is 'tomorrow', but must be a date"),
        ({"obsolete": "nowhere.dat"}, r"data\.obsolete is nowhere\.dat, which is not a file"),
        (
            {"template_structure_dir": None},
            r"max_template_date is 2100-01-01, but data\.template_structure_dir is null",
        ),
        (
            {"train": FeatureConfig(), "validation": FeatureConfig()},
            r"data\.train\.max_templates and data\.validation\.max_templates are 0",
        ),
        (
            {"template_chains": ["2abc_B"]},
            r"data\.template_structure_dir is .*, but data\.template_chains names the templates",
        ),
        (
            {
                "template_chains": ["2abc_B"],
                "template_structure_dir": None,
                "max_template_date": None,
                "train": FeatureConfig(),
                "validation": FeatureConfig(),
            },
            r"data\.template_chains is given, but data\.train\.max_templates and data\.validation\.max_templates are 0",
        ),
        (
            {
                "template_chains": ["2abc_B"],
                "template_structure_dir": None,
                "max_template_date": None,
                "store": "somewhere",
            },
            r"data\.template_chains is .*, but data\.store holds",
        ),
        ({"template_max_identity": 0.5}, r"data\.template_max_identity is 0\.5, but data\.template_chains is null"),
        ({"template_max_identity": 70.0}, r"data\.template_max_identity is 70\.0, but must be"),
    ],
)
def test_wrong_settings_are_one_line(searched: Path, changes: dict, message: str) -> None:
    """Catches a wrong folder, date or number that is found only when training has begun, or never."""
    with pytest.raises(UserError, match=message) as caught:
        find_chains(data_config(searched, **changes))
    assert "\n" not in str(caught.value)


def test_training_chains_as_templates(searched: Path, tmp_path: Path) -> None:
    """Catches a list of template chains that is not read, its limit lost on the way, and hits of search programs beside it."""
    folder = shutil.copytree(searched, tmp_path / "family")
    write_chain(folder, "3abc_A", "MKTAYLAKQRFLE")  # 11 of 13 residues are those of 1abc_A
    others = {"template_structure_dir": None, "max_template_date": None}
    for limit, found in ((0.85, [1, 0]), (0.84, [0, 0])):
        config = data_config(folder, **others, template_chains=[*SEQUENCES, "3abc_A"], template_max_identity=limit)
        masks = [batch["template_mask"] for batch in ChainDataModule(config, find_chains(config)).val_dataloader()]
        assert [mask[0, 0].tolist() for mask in masks] == [found, [0, 0]]  # 2abc_B is like none; a search had found it


def test_template_chains_without_structures(searched: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches chains of the list that have no structure, passed over without a word or ending the run."""
    others = {"template_structure_dir": None, "max_template_date": None}
    chains = find_chains(data_config(searched, **others, template_chains=["9abc_A", "2abc_B"]))
    assert "1 of 2 template chains have no structure, or no sequence" in capfd.readouterr().err
    assert chains.templates is not None
    assert chains.templates.chains is not None
    assert list(chains.templates.chains.sequences) == ["2abc_B"]
    with pytest.raises(UserError, match=r"data\.template_chains: none of 1 chain has a structure"):
        find_chains(data_config(searched, **others, template_chains=["9abc_A"]))


def test_model_and_data_must_agree_on_templates() -> None:
    """Catches a model that misses its template features at the first step, and templates read for nothing."""
    on, off = ModelConfig(templates=TemplateConfig(enabled=True)), ModelConfig()
    four, none = FeatureConfig(max_templates=4), FeatureConfig()
    check_templates(on, DataConfig(train=four, validation=four))
    check_templates(off, DataConfig(train=none, validation=none))
    with pytest.raises(UserError, match=r"model\.templates\.enabled is true, but data\.validation\.max_templates is 0"):
        check_templates(on, DataConfig(train=four, validation=none))
    with pytest.raises(UserError, match=r"model\.templates\.enabled is false, but data\.train\.max_templates is 4"):
        check_templates(off, DataConfig(train=four, validation=none))
