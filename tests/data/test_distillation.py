"""Self-distillation sets: what is masked, how many rows are used, and how often a sample is from the set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evodsp.config import FeatureConfig
from evodsp.data.samples.dataset import SampleDataset
from evodsp.data.samples.sample_records import sampled_rows
from evodsp.data.samples.selection import DISTILLED, ChainDraws, DistillationSet, MixedDraws
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.msa import merge_alignments
from evodsp.errors import UserError
from evodsp.rng import Draws
from scripts.examples.synthetic.mmcif_writer import write_mmcif
from tests.builders.alignments import make_alignment
from tests.builders.chains import MemoryStore, make_chain
from tests.builders.finished import finished

LETTERS = "MKTAYIAKQRWLE"
PLDDT = np.array([20, 49.9, 50, 90, 95, 49, 70, 71, 72, 73, 10, 99, 100], np.float32)


def predicted(folder: Path, plddt: np.ndarray = PLDDT, rows: int = 12) -> ChainFiles:
    """One predicted chain, p1_A, with `rows` sequences."""
    (folder / "structures").mkdir()
    (folder / "alignments" / "p1_A").mkdir(parents=True)
    write_mmcif(folder / "structures" / "p1.cif", [replace(make_chain("p1", LETTERS), chain_id="A")], [plddt])
    generator = np.random.default_rng(0)
    others = ["".join(generator.choice(list("ARNDCQ"), len(LETTERS))) for _ in range(rows - 1)]
    text = "".join(f">r{i}\n{letters}\n" for i, letters in enumerate([LETTERS, *others]))
    (folder / "alignments" / "p1_A" / "hits.a3m").write_text(text)
    return ChainFiles(folder / "alignments", folder / "structures", min_plddt=50.0)


def test_unsure_residues_are_masked(tmp_path: Path) -> None:
    """A model that learns what the prediction was unsure of, or residues of exactly 50 left out, or all of them."""
    store = predicted(tmp_path)
    chain, whole = store.chain("p1_A"), ChainFiles(store.alignment_dir, store.structure_dir).chain("p1_A")
    sure = PLDDT >= 50
    assert (chain.mask[sure] == whole.mask[sure]).all()
    assert whole.mask[~sure].sum() > 0
    assert chain.mask[~sure].sum() == 0
    assert np.abs(chain.positions[~sure]).sum() == 0
    assert (chain.sequence, chain.resolution, chain.release_date) == (LETTERS, None, None)


@pytest.mark.parametrize(
    ("plddt", "said"),
    [(PLDDT / 100, "B-factors reach 1, but"), (PLDDT * 0.4, "has no residue of a pLDDT of at least 50")],
)
def test_structures_that_are_no_predictions_are_refused(tmp_path: Path, plddt: np.ndarray, said: str) -> None:
    """A pLDDT between 0 and 1 would mask everything, without a word."""
    with pytest.raises(UserError, match=said):
        predicted(tmp_path, plddt).chain("p1_A")


def test_rows_are_a_random_sample_with_the_query() -> None:
    """The first rows only, another query, deletions of other rows, or more rows than allowed."""
    msa = merge_alignments([make_alignment(LETTERS, rows=40)])
    seen = set()
    for index in range(200):
        found = sampled_rows(msa.num_alignments, 8, Draws.root(index))
        assert found is not None
        assert found[0] == 0
        assert len(set(found.tolist())) == 8
        assert (np.diff(found) > 0).all()
        seen |= set(found.tolist())
    assert seen == set(range(msa.num_alignments))
    assert sampled_rows(msa.num_alignments, 40, Draws.root(0)) is None
    assert sampled_rows(msa.num_alignments, None, Draws.root(0)) is None


def test_a_quarter_of_the_samples_is_from_the_experiments(tmp_path: Path) -> None:
    """A mix of another share, a replacement from the other set, or one set's chains read from the other's folders."""
    draws = Draws.root(0)
    experiments = ChainDraws(draws, ["a_A", "b_A"])
    distilled = ChainDraws(draws.at("distillation"), [DISTILLED + "p1_A", DISTILLED + "p2_A"])
    mixed = MixedDraws(draws, experiments, distilled, 0.75)
    drawn = [mixed.choose(i, ()) for i in range(2000)]
    share = sum(key.startswith(DISTILLED) for key in drawn) / len(drawn)
    assert abs(share - 0.75) < 4 * np.sqrt(0.75 * 0.25 / 2000)
    replaced = [mixed.choose(i, {DISTILLED + "p2_A", "a_A"}) for i in range(1000)]
    for before, after in zip(drawn, replaced, strict=False):
        assert before.startswith(DISTILLED) == after.startswith(DISTILLED)

    config = replace(FeatureConfig(), crop_size=None, msa_clusters=4, extra_msa=50, recycles=0)
    memory, store = MemoryStore(make_chain("1abc", "ACDEFGHIK")), predicted(tmp_path)
    data = SampleDataset(memory, ["1abc_A"], config, 0, training=True, distillation=DistillationSet(store, 5))
    for index in range(5):
        sample = finished(data.make(index, DISTILLED + "p1_A"), config)
        assert sample["aatype"].shape[-1] == len(LETTERS)
        assert int(sample["msa_row_mask"].sum() + sample["extra_msa_row_mask"].sum()) == 5
        assert float(sample["resolution"]) == 0
        assert data.make(index, "1abc_A")["aatype"].shape[-1] == 9
