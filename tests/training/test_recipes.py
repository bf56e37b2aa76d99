"""The configs of AlphaFold2's recipe, beside the numbers of its supplement and, at full widths, on real chains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from evodsp.cli import main
from evodsp.config import ModelConfig, leaves
from evodsp.parallel.config import WHEN_TO_RAISE
from evodsp.parallel.group import init_mesh
from evodsp.report.runs import read_curve
from evodsp.training.chains import ChainDataModule
from evodsp.training.checks import CheckedRun, Settings, check_run
from evodsp.training.command import TrainingCLI
from evodsp.training.gradients import learning_rate
from evodsp.training.world import World
from evodsp.weights import by_name
from evodsp.weights.checkpoint import read_checkpoint
from scripts.benchmarks.fake_ranks import fake_group
from tests.builders.training import changed
from tests.builders.training_chains import SEQUENCES

CONFIGS = Path(__file__).parents[2] / "configs"
TURNS = f"one after another; {WHEN_TO_RAISE}"
NO_GRAPHS = (
    "this run has no CUDA graphs, because data.train.crop_size is null, and each length would be recorded by itself"
)

EVERY_STAGE = {
    # 1.11.3: training protocol
    "global_batch": 128,
    "model.optimizer.beta1": 0.9,
    "model.optimizer.beta2": 0.999,
    "model.optimizer.eps": 1e-6,
    "model.optimizer.schedule": "constant",
    "trainer.gradient_clip_val": 0.1,
    "model.optimizer.clip": "sample",
    # 1.11.7: evaluator setup
    "model.ema_decay": 0.999,
    # 1.10 and algorithm 31: 1 to 4 passes
    "data.train.recycles": 3,
    "data.train.uniform_recycling": True,
    # 1.11.5: loss clamping
    "data.train.clamp_fape_fraction": 0.9,
    # 1.11.6: dropout
    "model.evoformer.msa_dropout": 0.15,
    "model.evoformer.pair_dropout": 0.25,
    "model.extra_msa.msa_dropout": 0.15,
    "model.extra_msa.pair_dropout": 0.25,
    "model.templates.pair_dropout": 0.25,
    "model.structure_module.dropout": 0.1,
    # 1.2.5: filtering
    "data.sampling": "alphafold2",
    "data.filters.max_resolution": 9.0,
    "data.filters.max_residue_share": 0.8,
    # 1.2.1 and 1.2.3
    "data.filters.max_release_date": "2018-04-30",
    "data.max_template_date": "2018-04-30",
    "data.train.max_templates": 4,
    "model.templates.enabled": True,
    # 1.2.6: block deletion
    "data.train.block_delete": True,
    "data.train.block_delete_fraction": 0.3,
    "data.train.block_delete_blocks": 5,
    # 1.2.7: MSA clustering
    "data.train.masked_msa_fraction": 0.15,
    "data.train.masked_uniform": 0.1,
    "data.train.masked_profile": 0.1,
    "data.train.masked_same": 0.1,
    # 1.3: self-distillation
    "data.distillation.sampling": "alphafold2",
    "data.distillation.index": "DATA/predictions_index",
    "data.distillation.fraction": 0.75,
    "data.distillation.min_plddt": 50.0,
    "data.distillation.max_msa_rows": 1000,
    # 1.9: equation 7
    "model.loss.backbone_fape": 0.5,
    "model.loss.sidechain_fape": 0.5,
    "model.loss.torsion": 0.5,
    "model.loss.angle_norm": 0.01,
    "model.loss.distogram": 0.3,
    "model.loss.masked_msa": 2.0,
    "model.loss.plddt": 0.01,
    "model.loss.confidence_min_resolution": 0.1,
    "model.loss.confidence_max_resolution": 3.0,
    "model.loss.scale_by_length": True,
    # 1.6 and 1.7.2: stacks
    "model.evoformer.blocks": 48,
    "model.extra_msa.blocks": 4,
    "model.templates.blocks": 2,
    "model.structure_module.iterations": 8,
}
INITIAL = {
    "max_samples": 10_000_000,
    "model.optimizer.lr": 1e-3,
    "model.optimizer.warmup_samples": 128_000,
    "model.optimizer.drop_samples": 6_400_000,
    "model.optimizer.drop_factor": 0.95,
    "data.train.crop_size": 256,
    "data.train.msa_clusters": 128,
    "data.train.extra_msa": 1024,
    "model.loss.experimentally_resolved": 0.0,
    "model.loss.violation": 0.0,
    "model.loss.pae": 0.0,
}
FINE_TUNING = {
    "max_samples": 1_500_000,
    "model.optimizer.lr": 5e-4,
    "model.optimizer.warmup_samples": 0,
    "data.train.crop_size": 384,
    "data.train.msa_clusters": 512,
    "data.train.extra_msa": 5120,
    "model.loss.experimentally_resolved": 0.01,
    "model.loss.violation": 1.0,
    "model.loss.pae": 0.0,
    "model.heads.experimentally_resolved": True,
}
PTM = {**FINE_TUNING, "model.loss.pae": 0.1, "model.heads.predicted_aligned_error": True}
STAGES = {"af2_initial": INITIAL, "af2_finetune": FINE_TUNING, "af2_finetune_ptm": PTM}
"""Tables 4 and 5, sections 1.9.7 and 1.11, of AlphaFold2's supplement."""


def settings_of(name: str, folder: Path, *words: str, **changes: Any) -> Settings:
    """The settings of a config with `changes` of its `data`, without the weights that it starts from."""
    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    if (start := content.pop("init_from", None)) in by_name.NAMES:
        content["model"] = {"preset": start, **content["model"]}
    content["data"] |= changes
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return TrainingCLI("fit", ["--config", str(folder / f"{name}.yaml"), *words]).settings


def by_option(settings: Settings) -> dict[str, Any]:
    """The value of each option."""
    parts = {"model": settings.model, "data": settings.data}
    found = {name: value for part in parts for name, value in leaves(parts[part], part)}
    found |= {name.removeprefix("run."): value for name, value in leaves(settings.run, "run")}
    return found | {f"trainer.{key}": value for key, value in settings.trainer.items()}


@pytest.mark.parametrize("name", STAGES)
def test_each_number_is_the_supplements(name: str, tmp_path: Path) -> None:
    """A number lost in an edit of the config, or a changed default that the config relies on."""
    found = by_option(settings_of(name, tmp_path))
    expected = {**EVERY_STAGE, **STAGES[name]}
    assert {key: found[key] for key in expected} == expected
    # Validation sees what training sees, whole and with all recycles; a constant learning rate stays constant in fine-tuning.
    for size in ("msa_clusters", "extra_msa", "max_templates", "recycles"):
        assert found[f"data.validation.{size}"] == found[f"data.train.{size}"]
    assert found["data.validation.crop_size"] is None
    assert (found["model.optimizer.drop_samples"] < found["max_samples"]) == (name == "af2_initial")


def test_defaults_are_the_numbers_of_the_initial_training(tmp_path: Path) -> None:
    """A changed default, which no config of AlphaFold2's stages relies on."""
    defaults = by_option(TrainingCLI("fit", [f"--output={tmp_path}/run"]).settings)
    other = {name for name, value in {**EVERY_STAGE, **INITIAL}.items() if defaults[name] != value}
    assert other == {
        "global_batch", "data.sampling", "data.filters.max_release_date", "data.max_template_date", "data.train.max_templates",
        "model.templates.enabled", "data.train.block_delete", "data.distillation.sampling", "data.distillation.index",
    }  # fmt: skip


@pytest.fixture(scope="module", params=STAGES)
def recipe(
    request: pytest.FixtureRequest, chains: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Settings]:
    """The name of a stage, and the settings of its run on the two small chains."""
    name, folder = request.param, tmp_path_factory.mktemp("recipe")
    cache = {
        chain: {"release_date": "2010-01-01", "seq": letters, "resolution": 2.0, "cluster_size": 1}
        for chain, letters in SEQUENCES.items()
    }
    (folder / "cache.json").write_text(json.dumps(cache))
    folders = {"alignment_dir": f"{chains}/alignments", "structure_dir": f"{chains}/mmcif_files"}
    index = [
        f"--output={folder}/predictions_index",
        "--workers=0",
        *(f"--{part}={path}" for part, path in folders.items()),
    ]
    assert main(["data", "index", *index]) == 0
    own = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["data"]["distillation"]
    return name, settings_of(
        name, folder, f"--output={folder}/run", "--trainer.accelerator=cpu",
        **folders, template_structure_dir=f"{chains}/mmcif_files", chain_data_cache=f"{folder}/cache.json",
        distillation={**own, **folders, "index": f"{folder}/predictions_index"}, num_workers=0, time_limit=None,
    )  # fmt: skip


@pytest.mark.parametrize(("ranks", "sequence", "accumulate"), [(8, 2, 32), (512, 8, 2)])
def test_the_recipe_is_the_same_on_every_mesh(
    recipe: tuple[str, Settings], ranks: int, sequence: int, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ranks that do not exist: a step of other samples, a run of other length, another learning rate at a sample."""
    launched = {"WORLD_SIZE": ranks, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for variable, value in launched.items():
        monkeypatch.setenv(variable, str(value))
    name, settings = recipe
    run = check_run("fit", changed(settings, f"parallel.sequence: {sequence}"))
    said = f"parallel.sequence is {sequence}, so {ranks // sequence} data ranks take the 128 samples of a step"
    assert f"{said} {TURNS}" in run.notes
    assert (run.ranks, run.batching.data_ranks, run.batching.accumulate) == (ranks, ranks // sequence, accumulate)
    assert run.last_step == {"af2_initial": 78_125, "af2_finetune": 11_719, "af2_finetune_ptm": 11_719}[name]
    config, batch, step = run.settings.model.optimizer, run.batching.samples, 40_000 // 128
    expected = 0.001 * 40_064 / 128_000 if name == "af2_initial" else 0.0005
    assert learning_rate(step * batch, batch, config, 0) == pytest.approx(expected)
    whole = range(step * 128, step * 128 + 128)
    for rank in (0, sequence - 1, sequence, ranks - 1):
        with fake_group(ranks, rank):
            mesh = init_mesh(sequence, "cpu")
            assert (mesh.data, mesh.data_rank) == (ranks // sequence, rank // sequence)
            world = Mock(spec=World, data_ranks=mesh.data, data_rank=mesh.data_rank, reads=True)
        assert samples_of_a_step(run, world, step) == list(whole[rank // sequence :: ranks // sequence])


@pytest.fixture(scope="module")
def quickstart(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("quickstart")
    folders = {"alignment_dir": f"{chains}/alignments", "structure_dir": f"{chains}/mmcif_files"}
    lists = {name: ["1abc_A"] for name in ("train_chains", "validation_chains")}
    return settings_of("quickstart", folder, f"--output={folder}/run", **folders, **lists)


@pytest.mark.parametrize(
    ("options", "gpus", "said"),
    [
        ("", 0, []),
        ("", 4, ["and the machine has 4 GPUs; add --trainer.accelerator gpu --trainer.devices 1"]),
        ("parallel.sequence: 2", 2, ["add --trainer.accelerator gpu --trainer.devices 2"]),
        (
            "parallel.sequence: 2",
            1,
            ["has 1 GPU; add --trainer.accelerator gpu --trainer.devices 1 --parallel.sequence 1"],
        ),
        ("parallel.sequence: 2, global_batch: 4", 0, [f"1 data rank takes the 4 samples of a step {TURNS}"]),
        ("trainer.accelerator: gpu, trainer.devices: 1", 4, [NO_GRAPHS]),
        ("trainer.accelerator: gpu, trainer.devices: 1, data.train.crop_size: 32", 4, []),
        ("trainer.accelerator: gpu, trainer.devices: 1, cuda_graphs: false", 4, []),
        ("trainer.accelerator: gpu, trainer.devices: 4, parallel.sequence: 2, global_batch: 2", 4, [NO_GRAPHS]),
    ],
)
def test_a_run_says_what_makes_it_slow(
    quickstart: Settings, options: str, gpus: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a config for CPUs that leaves the GPUs of a machine alone in silence, ranks that share samples one after another,
    GPUs without CUDA graphs, and such a line about the demonstration on two ranks, or about a run that uses its ranks well."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    notes = [note for note in check_run("fit", changed(quickstart, options)).notes if "resolution" not in note]
    assert len(notes) == len(said)
    assert all(note.endswith(end) for note, end in zip(notes, said, strict=True)), notes


def samples_of_a_step(run: CheckedRun, world: World, step: int) -> list[int]:
    """The samples that a data rank takes for optimizer step `step`."""
    module = ChainDataModule(run.settings.data, run.chains, run.settings.run.seed, world)
    module.trainer = Mock(accumulate_grad_batches=run.batching.accumulate)
    module.load_state_dict({"samples": step * 128})
    batches = iter(module.train_dataloader().indices)
    return [index for _ in range(run.batching.accumulate) for index in next(batches)]


def test_own_chains_need_their_two_folders_only(chains: Path, tmp_path: Path) -> None:
    """A config for a first run that lacks a setting, or has nonsensical ones; a batch that only some machines divide."""
    folders = {"alignment_dir": f"{chains}/alignments", "structure_dir": f"{chains}/mmcif_files"}
    settings = settings_of("finetune_own", tmp_path, f"--output={tmp_path}/run", "--trainer.accelerator=cpu", **folders)
    for sequence in (1, 2, 4):
        run = check_run("fit", changed(settings, f"parallel.sequence: {sequence}"))
        assert (run.batching.samples, run.last_step) == (8, 1000)
    assert run.settings.model.model_config() == ModelConfig.preset("model_3")  # that of init_from
    text = (CONFIGS / "finetune_own.yaml").read_text()
    assert len([line for line in text.splitlines() if not line.startswith("#")]) <= 10


LENGTHS = {"102m_A": 154, "1k1a_A": 241, "2q2k_A": 70}
TWO_BLOCKS = [f"--model.{stack}.blocks=2" for stack in ("evoformer", "extra_msa")]
FEW = [
    f"--data.{part}.{name}={value}"
    for part in ("train", "validation")
    for name, value in (("crop_size", 48), ("msa_clusters", 16), ("extra_msa", 32), ("recycles", 1))
]
"""Samples so small that a step takes seconds; the widths of the model stay."""


@pytest.mark.verify
@pytest.mark.parametrize("name", ["af2_initial", "af2_finetune", "af2_finetune_ptm"])
def test_the_recipe_trains_and_resumes(name: str, real_data: Path, tmp_path: Path) -> None:
    """Settings that do not go together at full size: heads that a loss needs, templates without features, rows of templates
    that leave no cluster, a first checkpoint that does not resume."""
    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    content.pop("init_from", None)
    (tmp_path / "cache.json").write_text(
        json.dumps(
            {
                chain: {
                    "release_date": "2010-01-01",
                    "seq": "ACDEFGHIKL" * (length // 10),
                    "resolution": 2.0,
                    "cluster_size": 1,
                }
                for chain, length in LENGTHS.items()
            }
        )
    )
    content["data"] |= {
        "alignment_dir": str(real_data / "alignments"),
        "structure_dir": str(real_data / "mmcif_files"),
        "template_structure_dir": str(real_data / "mmcif_files"),
        "chain_data_cache": str(tmp_path / "cache.json"),
        "distillation": {},
        "train_chains": list(LENGTHS),
        "validation_chains": ["2q2k_A"],
        "samples_per_epoch": 1,
        "num_workers": 0,
        "time_limit": None,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    words = ["fit", "--config", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "run"), "--global_batch=1"]
    words += [*TWO_BLOCKS, *FEW, "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1"]
    assert main([*words, "--trainer.max_steps=1"]) == 0
    assert main([*words, "--trainer.max_steps=2", "--ckpt_path=last"]) == 0
    rows = read_curve(tmp_path / "run" / "curve.csv")
    losses = {"af2_initial": (), "af2_finetune": ("violation",), "af2_finetune_ptm": ("violation", "pae")}[name]
    assert list(rows) == [0, 1]
    for row in rows.values():
        assert float(row["val/loss"]) > 0
        assert all(float(row[f"train/{term}"]) > 0 for term in ("masked_msa", "backbone_fape", *losses))
    rates = [float(row["train/lr"]) for row in rows.values()]
    assert rates == pytest.approx([1e-3 / 128_000, 2e-3 / 128_000] if name == "af2_initial" else [5e-4, 5e-4])
    checkpoint = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert checkpoint["global_step"] == 2
    assert checkpoint["model_config"]["channels"] == {"msa": 256, "pair": 128, "extra_msa": 64, "single": 384}
