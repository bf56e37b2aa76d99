"""Self-distillation sets of a run: their own index, store, cache, filters and weights, what is missing, and a longer run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from evodsp.cli import main
from evodsp.config import FeatureConfig, FilterConfig
from evodsp.data.build import build
from evodsp.data.samples.selection import DISTILLED, precise_uniform
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.errors import UserError
from evodsp.report.runs import read_curve
from evodsp.rng import Draws
from evodsp.training.chains import ChainDataModule, find_chains
from evodsp.training.config import DataConfig, DistillationConfig
from tests.builders.bad_chains import samples, sources, write_sets
from tests.builders.builds import config as build_config
from tests.builders.processes import ROOT

CHAINS = 4
KEYS = [f"2{number:03d}_A" for number in range(CHAINS)]
NAMES = [DISTILLED + key for key in KEYS]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """experiments/ and predictions/ of four chains each, an index of the predictions and a store of them."""
    root = tmp_path_factory.mktemp("sets")
    write_sets(root, CHAINS)
    predictions = root / "predictions"
    roots = ["--alignment_dir", str(predictions / "alignments"), "--structure_dir", str(predictions / "mmcif_files")]
    assert main(["data", "index", *roots, "--output", str(root / "index"), "--workers=0"]) == 0
    assert main(["data", "build", *roots, "--output", str(root / "store"), "--min_plddt=50", "--workers=1"]) == 0
    build(build_config(predictions, root / "unmasked"))
    return root


def settings(sets: Path, distillation: dict[str, Any], **changes: Any) -> DataConfig:
    experiments, predictions = (
        {"alignment_dir": str(sets / kind / "alignments"), "structure_dir": str(sets / kind / "mmcif_files")}
        for kind in ("experiments", "predictions")
    )
    folders = {} if "store" in distillation else predictions
    return DataConfig(**experiments, distillation=DistillationConfig(**{**folders, **distillation}), **changes)


def cache(folder: Path, **entries: Any) -> str:
    (folder / "cache.json").write_text(json.dumps(entries))
    return str(folder / "cache.json")


@pytest.mark.parametrize("source", ["index", "store"])
def test_samples_are_those_from_the_files(sets: Path, source: str) -> None:
    """Catches an index or a store of the set that is ignored, one that holds what a prediction is unsure of, and an index whose
    files are still looked for in folders."""
    features = FeatureConfig(crop_size=10, msa_clusters=4, extra_msa=3, recycles=0)
    both = [find_chains(settings(sets, given, train=features)) for given in ({}, {source: str(sets / source)})]
    found = both[1].distillation
    assert found is not None
    if source == "store":
        assert isinstance(found.source, FeatureStore)
    else:
        assert isinstance(found.source, ChainFiles)
        assert found.source.index is not None
    assert both[0].distilled == both[1].distilled == NAMES
    data = [
        ChainDataModule(settings(sets, {}, train=features), found)._samples(found.train, features, training=True)
        for found in both
    ]
    for name in NAMES:
        expected, made = (samples.make(7, name) for samples in data)
        assert expected.keys() == made.keys()
        assert all(torch.equal(expected[entry], made[entry]) for entry in expected)
        assert float(made["all_atom_mask"].sum(-1).min()) == 0, "a residue that the prediction is unsure of"


def test_a_set_has_its_own_filters_and_weights(sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches filters of experiments that leave all predictions out for want of a resolution, and weights that are ignored, or
    are those of the other chains."""
    facts = {"resolution": None, "release_date": None}
    given = cache(tmp_path, **{
        KEYS[0]: {**facts, "seq": "ACDEFGHIKL" * 30}, KEYS[1]: {**facts, "seq": "A" * 300},
        KEYS[2]: {**facts, "seq": "ACDEFGHIKL" * 60, "cluster_size": 4}})  # fmt: skip
    assert find_chains(settings(sets, {"chain_data_cache": given})).distilled == [NAMES[0], NAMES[2]]
    said = f"2 of 4 distillation chains; left out: 1 not in {given}, 1 more than 80% of one residue type"
    assert said in capsys.readouterr().err
    weighted = {"chain_data_cache": given, "sampling": "alphafold2"}
    found = find_chains(settings(sets, weighted))
    assert found.weights is None
    assert found.distilled_weights is not None
    assert found.distilled_weights.tolist() == [300 / 512, 1 / 4]
    data = ChainDataModule(settings(sets, weighted), found)
    samples = data._samples(found.train, FeatureConfig(), training=True)
    drawn = np.array([key == NAMES[0] for i in range(4000) if (key := samples.key_of(i)).startswith(DISTILLED)])
    assert abs(drawn.mean() - 0.7009) < 4 * np.sqrt(0.7 * 0.3 / len(drawn))
    indexed = find_chains(settings(sets, {"index": str(sets / "index"), "sampling": "alphafold2"}))
    assert indexed.distilled == NAMES
    assert indexed.distilled_weights is not None
    assert indexed.distilled_weights.tolist() == [0.5] * CHAINS  # short chains, of clusters of their own
    allowed = replace(FilterConfig(), max_resolution=None, max_residue_share=None)
    assert find_chains(settings(sets, {"chain_data_cache": given, "filters": allowed})).distilled == NAMES[:3]
    with pytest.raises(
        UserError, match=r"data\.distillation\.filters: 0 of 4 distillation chains; left out: .* unknown resol"
    ):
        find_chains(settings(sets, {"chain_data_cache": given, "filters": FilterConfig()}))


def test_missing_chains_of_the_set_are_listed(sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches predictions that are left out without a name, and those that have a structure but no alignments."""
    content = yaml.safe_load((sets / "run.yaml").read_text())
    content["data"]["distillation"]["chains"] = [KEYS[0], "2abc_A", KEYS[3], "9abc_A"]
    (sets / "predictions" / "alignments" / "2abc_A").mkdir(exist_ok=True)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    fit = ["fit", "--config", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "run"), "--trainer.max_steps=1"]
    assert main([*fit, "--trainer.limit_val_batches=0"]) == 0
    (sets / "predictions" / "alignments" / "2abc_A").rmdir()
    listed = (tmp_path / "run" / "missing_chains.tsv").read_text()
    assert listed == "distillation/2abc_A\tno structure\ndistillation/9abc_A\tno alignments\n"
    assert (
        "evodsp: warning: 2 of 4 distillation chains are left out: 1 without alignments, 1 without structure; "
        f"{tmp_path / 'run' / 'missing_chains.tsv'} lists them" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("distillation", "changes", "message"),
    [
        ({"store": "nowhere"}, {}, "nowhere: no feature store there"),
        ({"store": "unmasked"}, {}, r"data\.distillation\.store is .*unmasked, which was built without --min_plddt"),
        ({"store": "store", "min_plddt": 70.0}, {}, r"min_plddt is 70, but .*store was built with --min_plddt 50"),
        ({}, {"store": "store"}, r"data\.store is .*store, which holds predictions"),
        ({"sampling": "alphafold2"}, {}, r"data\.distillation\.chain_data_cache and data\.distillation\.index are null"),
        ({"index": "nowhere"}, {}, "nowhere: not an index"),
        ({"chains": ["9abc_A"]}, {}, r"data\.distillation: none of 1 chain has alignments and a structure"),
        ({"filters": FilterConfig(max_release_date="soon"), "chain_data_cache": "cache", "sampling": "alphafold2"}, {},
         r"data\.distillation\.filters\.max_release_date is 'soon'"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line(
    sets: Path, tmp_path: Path, distillation: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    """Catches a store of the other kind trained on without a word, and messages that name the settings of the other chains."""
    given = cache(tmp_path, **{KEYS[0]: {"seq": "ACD"}})
    places = {name: str(sets / name) for name in ("unmasked", "store")} | {"cache": given}
    known = [{name: places.get(value, value) if isinstance(value, str) else value for name, value in part.items()}
             for part in (distillation, changes)]  # fmt: skip
    with pytest.raises(UserError, match=message) as caught:
        find_chains(settings(sets, known[0], **known[1]))
    assert "\n" not in str(caught.value)


def test_templates_of_a_set_need_a_store_that_has_them(sets: Path) -> None:
    """Catches templates of predictions looked for among those of the other chains only: most would be lost without a word."""
    features = FeatureConfig(msa_clusters=4, max_templates=1)
    both = {"train": features, "validation": features}
    with_files = {**both, "template_structure_dir": str(sets / "experiments" / "mmcif_files")}
    message = r"data\.distillation\.store is .*, which was built without templates"
    with pytest.raises(UserError, match=message):
        find_chains(settings(sets, {"store": str(sets / "store")}, **with_files))
    for kind, more in (("experiments", {}), ("predictions", {"min_plddt": 50.0})):
        templates = {"template_structure_dir": sets / kind / "mmcif_files"}
        build(build_config(sets / kind, sets / f"{kind}_with_templates", **templates, **more))
    whole, own = str(sets / "experiments_with_templates"), str(sets / "predictions_with_templates")
    with pytest.raises(UserError, match=r"the templates of data\.store are those of its own chains"):
        find_chains(settings(sets, {}, store=whole, **both))
    found = find_chains(settings(sets, {"store": own}, store=whole, **both))
    assert found.templates is not None
    assert found.distillation is not None
    assert found.distillation.templates is not None
    assert repr(found.distillation.templates.structures) != repr(found.templates.structures)


STEPS = 80


@pytest.mark.verify
def test_80_steps_on_two_ranks(tmp_path: Path) -> None:
    """Another mix than 25/75, or one that depends on the mesh or changes on resume; residues that a prediction is unsure of,
    and that a term of the loss sees all the same."""
    config = write_sets(tmp_path)

    def run(name: str, steps: int, *options: str, callback: str = "RecordSource") -> None:
        words = ["fit", f"--config={config}", f"--output={tmp_path / name}", f"--trainer.max_steps={steps}",
                 f"--trainer.callbacks=tests.builders.bad_chains.{callback}", "--checkpoint_every=20",
                 f"--data.samples_per_epoch={STEPS}", "--data.train.uniform_recycling=false", *options]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "evodsp", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr

    run("whole", STEPS, "--parallel.sequence=2")
    seen, found = samples(tmp_path / "whole"), sources(tmp_path / "whole")
    assert sorted(seen) == sorted(found) == list(range(STEPS))
    assert samples(tmp_path / "whole", rank=1) == seen
    draws = Draws.root(0).at("data")
    for index, (is_predicted, unsure, atoms) in found.items():
        assert is_predicted == (precise_uniform(draws.at("source", index), 0) < 0.75)
        assert unsure == (0 if is_predicted else 1)
        assert atoms >= 4  # N, CA, C, O at least
    share = sum(is_predicted for is_predicted, *_ in found.values()) / STEPS
    assert abs(share - 0.75) < 3 * math.sqrt(0.75 * 0.25 / STEPS)

    # In parts, and with nonsense in the labels of what the predictions are unsure of.
    run("parts", STEPS // 2 + 10, "--parallel.sequence=2", callback="Poison")
    run("parts", STEPS, "--parallel.sequence=2", "--ckpt_path=last", callback="Poison")
    assert samples(tmp_path / "parts") == seen
    whole, parts = (read_curve(tmp_path / name / "curve.csv") for name in ("whole", "parts"))
    losses = {name for name in whole[0] if name.startswith("train/loss")} | {"train/backbone_fape"} & set(whole[0])
    assert [[whole[step][name] for name in losses] for step in range(STEPS)] == [
        [parts[step][name] for name in losses] for step in range(STEPS)
    ]

    run("data", STEPS // 2, "--trainer.devices=2")
    assert samples(tmp_path / "data") | samples(tmp_path / "data", rank=1) == seen
    print(f"{STEPS} steps: {share:.3f} of the samples are predictions")
