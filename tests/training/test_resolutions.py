"""Structures without a resolution: who counts them, who says so, and the setting that gives them one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig, LossConfig
from evodsp.data.samples.dataset import SampleDataset
from evodsp.data.samples.selection import DISTILLED, CountedStructures, DistillationSet
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.report.runs import read_curve
from evodsp.training import chains as chains_module
from evodsp.training.chains import find_chains
from evodsp.training.config import DataConfig
from scripts.examples.synthetic.mmcif_writer import write_mmcif
from tests.builders.chains import MemoryStore, make_chain
from tests.builders.labelled_batch import WEIGHTS, batch_of
from tests.builders.small_model import config, features
from tests.builders.training_chains import BOTH, SEQUENCES, TINY, write_chain

KEY, OTHER = SEQUENCES
CONFIG = FeatureConfig(crop_size=6, msa_clusters=4, extra_msa=3, recycles=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two chains, of which the second has no resolution, and a config of `fit` that trains on both."""
    for key, letters in SEQUENCES.items():
        write_chain(tmp_path, key, letters)
    without(tmp_path, OTHER)
    roots = f"data:\n  alignment_dir: {tmp_path}/alignments\n  structure_dir: {tmp_path}/mmcif_files\n{BOTH}"
    (tmp_path / "tiny.yaml").write_text(TINY.replace("data:\n", roots))
    return tmp_path


def without(folder: Path, key: str) -> None:
    """Write the structure of a chain again, as a model that states no resolution."""
    chain = ChainFiles(folder / "alignments", folder / "mmcif_files").chain(key)
    write_mmcif(folder / "mmcif_files" / f"{chain.pdb_id}.cif", [dataclasses.replace(chain, resolution=None)])


def test_the_terms_that_ask_for_a_resolution() -> None:
    """Catches a term that counts other structures than `LossConfig.by_resolution` says, which the notes of a run name."""
    torch.manual_seed(0)
    heads = dataclasses.replace(config().heads, experimentally_resolved=True, predicted_aligned_error=True)
    model = AlphaFold(dataclasses.replace(config(), heads=heads)).double().eval()
    batch = {**features(1), **batch_of(1)}
    with torch.no_grad():
        output = model(batch)
        of = [
            total_loss(output, {**batch, "resolution": torch.tensor([value]).double()}, WEIGHTS, heads)[1]
            for value in (2.0, 0.0, 3.5)
        ]
    for terms in of[1:]:
        assert [name for name, loss in terms.items() if loss == 0 != of[0][name]] == [
            "plddt",
            "experimentally_resolved",
            "pae",
        ]
    assert WEIGHTS.by_resolution == ["plddt", "experimentally_resolved", "pae"]
    assert LossConfig().by_resolution == ["plddt"]


@pytest.mark.parametrize(
    ("assumed", "resolutions", "expected"),
    [
        (None, [2.0, 3.0, 0.1], None),
        (None, [0.0, 2.0, 0.0], "2 of 3 training chains have no resolution: they do not train plddt"),
        (
            None,
            [0.0, 3.1, 0.05],
            "1 of 3 training chains have no resolution and 2 have one outside of 0.1 to 3 Å: they do not train",
        ),
        (None, [0.0, np.nan, 2.0], "1 of 2 training chains that were looked up have no resolution: they do not train"),
        (2.0, [0.0, 0.0, 2.0], None),
        (2.0, [0.0, 4.0, 2.0], "1 of 3 training chains have one outside of 0.1 to 3 Å: they do not train"),
        (9.0, [0.0, 2.0, 2.0], "1 of 3 training chains have no resolution: they do not train"),
        (None, [], None),
    ],
)
def test_the_note_counts_what_the_losses_do(
    assumed: float | None, resolutions: list[float], expected: str | None
) -> None:
    """Catches chains above the largest resolution that nobody counts, unknown ones that are, and a note without a reason."""
    rule = CountedStructures(LossConfig(), assumed)
    line = rule.line(np.array(resolutions, np.float32), 3, "training chains")
    assert line is None if expected is None else str(line).startswith(expected)
    assert line is None or (", as in AlphaFold2, so train/plddt is 0 in steps of such chains alone" in line)
    assert line is None or ("data.assumed_resolution" in line) == ("have no resolution" in line)
    assert CountedStructures(LossConfig(plddt=0.0), assumed).line(np.zeros(3), 3, "training chains") is None


def test_samples_have_the_assumed_resolution() -> None:
    """Catches a setting that reaches one of the two sets, or takes the place of a resolution that is known."""
    store = MemoryStore(make_chain("1abc", "ACDEF", resolution=None), make_chain("2abc", "ACDEF", resolution=3.5))
    for assumed, expected in ((None, [0.0, 3.5, 0.0]), (2.0, [2.0, 3.5, 1.5])):
        predicted = mock.Mock(spec=ChainFiles, parsed=store.parsed, kind=store.kind)
        others = DistillationSet(predicted, 5, assumed_resolution=assumed and 1.5)
        data = SampleDataset(
            store, ["1abc_A"], CONFIG, 0, training=True, distillation=others, assumed_resolution=assumed
        )
        keys = ("1abc_A", "2abc_A", f"{DISTILLED}1abc_A")
        assert [float(data.make(0, key)["resolution"]) for key in keys] == expected


@pytest.mark.parametrize("how", ["read", "index", "cache", "sample"])
def test_the_resolutions_of_the_training_chains(folder: Path, how: str) -> None:
    """Catches a data set of which nobody knows the resolutions: a long one, with or without an index or cache."""
    roots = {"alignment_dir": str(folder / "alignments"), "structure_dir": str(folder / "mmcif_files")}
    more: dict[str, str] = {}
    if how == "index":
        options = [f"--{name}={value}" for name, value in roots.items()]
        assert main(["data", "index", *options, "--output", str(folder / "index"), "--workers=0"]) == 0
        more = {"index": str(folder / "index")}
    if how == "cache":
        facts = {"release_date": "2010-01-01", "seq": "ACDE", "cluster_size": 3}
        cache = {KEY: {**facts, "resolution": 2.0}, OTHER: {**facts, "resolution": 0.0}}
        (folder / "cache.json").write_text(json.dumps(cache))
        more = {"chain_data_cache": str(folder / "cache.json")}
    if how == "sample":
        (folder / "mmcif_files" / "3abc.cif").write_text("broken")
        (folder / "alignments" / "3abc_C").mkdir()
    with mock.patch.object(chains_module, "MOST_CHAINS_READ", 64 if how == "read" else 0):
        found = find_chains(DataConfig(**roots, **more))  # type: ignore[arg-type]
    assert found.resolutions.tolist() == [2.0, 0.0]


def test_fit_and_the_doctor_say_that_nothing_is_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches `train/plddt` of 0 for a whole run without a word, and a setting that does not change it."""
    note = "2 of 2 training chains have no resolution: they do not train plddt, as in AlphaFold2"
    without(folder, KEY)
    words = [f"--config={folder}/tiny.yaml", "--trainer.max_steps=1", "--trainer.limit_val_batches=0"]
    for name, options in (("none", []), ("assumed", ["--data.assumed_resolution=2"])):
        assert main(["fit", *words, f"--output={folder}/{name}", *options]) == 0
        assert (f"evodsp: warning: {note}" in capsys.readouterr().err) == (name == "none")
        assert (float(read_curve(folder / name / "curve.csv")[0]["train/plddt"]) > 0) == (name == "assumed")
    examine = ["data", "doctor", f"--config={folder}/tiny.yaml", f"--output={folder}/doctor", "--workers=0"]
    assert main(examine) == 0
    page, report = ((folder / "doctor" / f"doctor.{kind}").read_text() for kind in ("html", "json"))
    assert note in capsys.readouterr().out
    assert note in page
    assert json.loads(report)["not_counted"].startswith(note)
    text = (folder / "tiny.yaml").read_text()
    (folder / "tiny.yaml").write_text(text.replace("data:\n", "data:\n  assumed_resolution: 2\n"))
    assert main(examine) == 0
    assert "no resolution" not in capsys.readouterr().out
