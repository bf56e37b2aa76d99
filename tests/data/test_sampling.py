"""Which chain a sample is made of: filters, weights, draws, and what leaving chains out changes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evodsp.config import FeatureConfig, FilterConfig
from evodsp.data.index.metadata import UNKNOWN_CLUSTER, UNKNOWN_DAY, ChainTable, cached_table
from evodsp.data.samples.dataset import SampleDataset
from evodsp.data.samples.sample_records import sampled_rows
from evodsp.data.samples.selection import DISTILLED, ChainDraws, DistillationSet, MixedDraws, left_out_by_filters
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.msa import merge_alignments
from evodsp.errors import UserError
from evodsp.rng import Draws
from scripts.examples.synthetic.mmcif_writer import write_mmcif
from tests.builders.alignments import make_alignment
from tests.builders.chains import MemoryStore, make_chain
from tests.builders.finished import finished


def table(**columns: Any) -> ChainTable:
    """Unremarkable chains of 300 residues, but for the columns given."""
    n = len(next(iter(columns.values())))
    kinds = {
        "lengths": (300, np.int32),
        "resolutions": (2.0, np.float32),
        "release_days": (0, np.int32),
        "cluster_sizes": (1, np.int32),
        "largest_fractions": (0.1, np.float32),
        "unknown_fractions": (0.0, np.float32),
    }
    found = {name: np.array(columns.get(name, [usual] * n), kind) for name, (usual, kind) in kinds.items()}
    representatives = np.array(columns.get("representatives", range(n)), np.int32)
    return ChainTable([f"{i:05d}_A" for i in range(n)], representatives=representatives, **found)


def two_thousand() -> ChainTable:
    """Chains of all lengths in clusters of 1 to 500, some of unknown cluster, of which some are duplicates of others."""
    generator = np.random.default_rng(4)
    sizes = generator.choice([1, 2, 7, 40, 500, UNKNOWN_CLUSTER], 2000)
    representatives = np.arange(2000)
    representatives[1500:1800] = generator.integers(0, 1500, 300)
    sizes[1500:1800] = generator.choice([3, UNKNOWN_CLUSTER], 300)
    return table(lengths=generator.integers(10, 1500, 2000), cluster_sizes=sizes, representatives=representatives)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations Pearson's statistic is above its mean, with rare chains joined to classes of 20 draws."""
    order = np.argsort(expected)
    classes = (np.cumsum(expected[order]) / 20).astype(int)
    seen, wanted = np.bincount(classes, counts[order]), np.bincount(classes, expected[order])
    freedom = np.count_nonzero(wanted) - 1
    statistic = ((seen - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum()
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def formula(chains: ChainTable) -> np.ndarray:
    """The weights once more, chain by chain."""
    weights = []
    for row in range(len(chains)):
        size = int(chains.cluster_sizes[row])
        if size < 1:
            size = int(chains.cluster_sizes[chains.representatives[row]])
        if size < 1:
            size = sum(chains.representatives == chains.representatives[row])
        weights.append(min(max(int(chains.lengths[row]), 256), 512) / 512 / size)
    return np.array(weights)


@pytest.mark.parametrize("bad", [0, 300])
def test_draws_have_the_frequencies_of_the_formula(bad: int) -> None:
    """Weights that are wrong, draws that are not proportional to them, or replacements that favour some chains."""
    chains = two_thousand()
    weights = formula(chains)
    np.testing.assert_allclose(chains.frequencies(), weights, rtol=1e-12)
    draws = ChainDraws(Draws.root(3).at("data"), chains.keys, chains.frequencies())
    left_out = set(np.random.default_rng(1).permutation(chains.keys)[:bad].tolist())
    row_of = {key: row for row, key in enumerate(chains.keys)}
    number = 20_000
    counts = np.bincount([row_of[draws.choose(i, left_out)] for i in range(number)], minlength=2000)
    remaining = weights * [key not in left_out for key in chains.keys]
    assert counts[remaining == 0].sum() == 0
    deviations = chi_square(counts, number * remaining / remaining.sum())
    print(f"{bad} left out: chi-square {deviations:+.2f} standard deviations above its mean")
    assert abs(deviations) < 4
    assert chi_square(counts, np.full(2000, number / 2000)) > 100, "equal weights would pass too"


@pytest.mark.parametrize("weighted", [True, False])
def test_leaving_a_chain_out_changes_only_its_own_samples(weighted: bool) -> None:
    """Draws from a list that is shorter by one: nearly all samples would change."""
    keys = [f"{i}_A" for i in range(50)]
    draws = ChainDraws(Draws.root(0), keys, np.arange(1.0, 51.0) if weighted else None)
    before = [draws.choose(i, {"7_A"}) for i in range(500)]
    after = [draws.choose(i, {"7_A", "40_A"}) for i in range(500)]
    assert "40_A" in before
    assert "40_A" not in after
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "40_A")
    assert len({new for old, new in zip(before, after, strict=True) if old == "40_A"}) > 3


@pytest.mark.parametrize("weights", [[1.0, 2.0], [1.0, 2.0, 0.0], [1.0, 2.0, np.inf], [1.0, 2.0, np.nan]])
def test_missing_and_impossible_weights_are_refused(weights: list[float]) -> None:
    """Weights of zero, infinity or NaN, or fewer weights than chains: a chain would be drawn always or never."""
    with pytest.raises(ValueError, match="finite weights above 0"):
        ChainDraws(Draws.root(0), ["1aaa_A", "1bbb_A", "1ccc_A"], np.array(weights))


def test_a_light_chain_among_a_million_is_drawn() -> None:
    """A draw that rounds the cumulative weights, or has as few bits as `Draws.uniform`: of a million chains, light ones would
    come too often or never, or every second one only."""
    weights = np.full(1 << 20, 2.0**-6)
    weights[: 1 << 19] = 1 - 2.0**-6  # 2^19 in all: fp32 has no room for a light one behind them
    draws = ChainDraws(Draws.root(0), ["heavy"] * (1 << 19) + ["even", "odd"] * (1 << 18), weights)
    drawn = Counter(draws.candidate(i, 0) for i in range(3000))
    assert 10 < drawn["even"] < 40  # 23.4 expected
    assert 10 < drawn["odd"] < 40


def test_filters_name_every_reason() -> None:
    """A chain of NMR taken for one of unknown or perfect resolution, limits that exclude their own value, unknown values let
    in."""
    chains = table(
        resolutions=[9.0, 9.01, 0.0, np.nan, 2, 2, 2, 2],
        largest_fractions=[0.1, 0.1, 0.1, 0.1, 0.8, 0.81, np.nan, 0.1],
        release_days=[0, 0, 0, 0, 0, 0, 0, UNKNOWN_DAY],
    )
    reasons = {why: np.flatnonzero(rows).tolist() for why, rows in left_out_by_filters(chains, FilterConfig()).items()}
    assert reasons == {
        "unknown resolution": [3],
        "resolution above 9 Å": [1],
        "unknown sequence": [6],
        "more than 80% of one residue type": [5],
    }
    dated = table(release_days=[17651, 17652, UNKNOWN_DAY])  # 2018-04-30 and the day after
    found = left_out_by_filters(dated, FilterConfig(None, None, "2018-04-30"))
    assert {why: rows.tolist() for why, rows in found.items()} == {
        "unknown release date": [False, False, True],
        "released after 2018-04-30": [False, True, False],
    }


def write(folder: Path, **entries: Any) -> Path:
    path = folder / "chain_data_cache.json"
    path.write_text(json.dumps(entries))
    return path


def test_openfolds_cache_is_read(tmp_path: Path) -> None:
    """Columns in another order than the keys, null and -1 taken for numbers, X not counted."""
    path = write(
        tmp_path,
        b_A={"release_date": "1970-01-11", "seq": "AAAXX", "resolution": 1.5, "cluster_size": 7},
        a_A={"release_date": "2018-04-30T00:00:00Z", "seq": "MK", "resolution": 0.0, "cluster_size": -1},
        c_A={"release_date": None, "seq": None, "resolution": None},
    )
    chains = cached_table(path)
    assert list(chains.keys) == ["a_A", "b_A", "c_A"]
    assert chains.lengths.tolist() == [2, 5, 0]
    np.testing.assert_array_equal(chains.resolutions, np.array([0, 1.5, np.nan], np.float32))
    assert chains.release_days.tolist() == [17651, 10, UNKNOWN_DAY]
    assert chains.cluster_sizes.tolist() == [UNKNOWN_CLUSTER, 7, UNKNOWN_CLUSTER]
    np.testing.assert_array_equal(chains.largest_fractions, np.array([0.5, 0.6, np.nan], np.float32))
    np.testing.assert_array_equal(chains.unknown_fractions, np.array([0, 0.4, np.nan], np.float32))
    assert chains.representatives.tolist() == [0, 1, 2]


def test_a_cache_without_chains_is_one_line(tmp_path: Path) -> None:
    """A table without rows, which no sampling can start from."""
    path = write(tmp_path)
    for text in ("[]", "{}", "3"):
        path.write_text(text)
        with pytest.raises(UserError, match="chain_data_cache"):
            cached_table(path)


# Self-distillation sets: what is masked, how many rows are used, and how often a sample is from the set.


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
