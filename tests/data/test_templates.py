"""Template features: golden parity from real structure files, query73_A end to end, realignment and every rejection."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.parsers import parse_fasta
from evodsp.data.records import Chain, ProteinSequence, Structure
from evodsp.data.store import FeatureStore
from evodsp.data.template_hits import HitLimits, TemplateHit, parse_hhr, parse_hmmsearch, select_hits
from evodsp.data.templates import (
    HHBLITS_LETTERS,
    ChainSource,
    TemplateFeatures,
    TemplateRejection,
    find_residues,
    realign,
    rejection_summary,
    template_features,
)
from evodsp.errors import FileFormatError, UserError
from evodsp.geometry.alphabet import GAP, UNKNOWN, encode
from evodsp.geometry.residues import ATOM_ORDER
from tests.conftest import load

LETTERS = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEV"
QUERY = ProteinSequence("q", LETTERS)
N, CA, C, CB, OXYGEN = (ATOM_ORDER[name] for name in ("N", "CA", "C", "CB", "O"))


def make_chain(letters: str = LETTERS, key: str = "1abc_A") -> Chain:
    """A straight chain; residue i has its backbone and CB at x = 3.8 i plus the atom's number in y."""
    length = len(letters)
    positions, mask = np.zeros((length, 37, 3), np.float32), np.zeros((length, 37), np.float32)
    mask[:, [N, CA, C, CB, OXYGEN]] = 1
    mask[[letter == "G" for letter in letters], CB] = 0
    positions[..., 0] = 3.8 * np.arange(length)[:, None]
    positions[..., 1] = np.arange(37)
    pdb_id, chain_id = key.split("_")
    return Chain(
        pdb_id, chain_id, letters, np.arange(length, dtype=np.int32), ("",) * length, np.zeros(length, bool),
        positions * mask[..., None], mask,
    )  # fmt: skip


def make_hit(query: str, hit: str, *, first_query: int = 0, first_hit: int = 0, key: str = "1abc_A", score=10.0):
    """A hit from two aligned rows with '-' for gaps."""

    def indices(row: str, first: int) -> np.ndarray:
        is_residue = np.array([letter != "-" for letter in row])
        return np.where(is_residue, first - 1 + np.cumsum(is_residue), -1).astype(np.int32)

    own, other = indices(query, first_query), indices(hit, first_hit)
    columns = int(((own >= 0) & (other >= 0)).sum())
    return TemplateHit(1, key, *key.split("_"), columns, score, query, hit, own, other)


class Chains:
    """A source of chains in memory; entries of which a chain is asked that they do not have raise as a file would."""

    def __init__(self, *chains: Chain, error: UserError | None = None) -> None:
        self.chains, self.error = {chain.key: chain for chain in chains}, error

    def has_structure(self, key: str) -> bool:
        return self.error is not None or any(chain.pdb_id == key.split("_")[0] for chain in self.chains.values())

    def chain(self, key: str) -> Chain:
        if self.error is not None:
            raise self.error
        if key not in self.chains:
            raise UserError(f"no protein chain '{key}'")
        return self.chains[key]

    def structure(self, pdb_id: str) -> Structure:
        there = {chain.chain_id: chain for chain in self.chains.values() if chain.pdb_id == pdb_id}
        return Structure(pdb_id, "", None, None, there)


def test_raw_features_golden(golden: Path, real_data: Path):
    """Catches any difference from AF2's raw features of real files: order of letters, columns, masks, layout, dtype.

    The golden templates were moved so that their first N lies at (4, 0, 0): moved back, in float32, hence the 1e-5.
    """
    expected = load(golden / "features_raw_full.npz")
    query = parse_fasta(real_data / "fasta" / "6kwc.fasta")[0]
    store = FeatureStore(real_data / "alignments", real_data / "mmcif_files")
    hits = []
    for name, row, score in zip(
        expected["template_domain_names"],
        expected["template_sequence"],
        expected["template_sum_probs"][:, 0],
        strict=True,
    ):
        letters = row.decode()
        first = len(letters) - len(letters.lstrip("-"))
        piece = letters.strip("-")
        aligned = query.letters[first : first + len(piece)]
        hits.append(make_hit(aligned, piece, first_query=first, first_hit=7, key=name.decode(), score=float(score)))
    found, rejected = template_features(query, hits[::-1], store)
    raw = found.raw()
    assert rejected == {}
    assert set(raw) == {name for name in expected if name.startswith("template_")}
    for name, value in raw.items():
        assert (value.dtype, value.shape) == (expected[name].dtype, expected[name].shape), name
        if name != "template_all_atom_positions":
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
    for number, hit in enumerate(hits):
        column = hit.indices_query[0]
        here, mask = raw["template_all_atom_positions"][number], raw["template_all_atom_masks"][number, ..., None]
        moved = (here - here[column, N] + np.array([4, 0, 0], np.float32)) * mask
        np.testing.assert_allclose(moved, expected["template_all_atom_positions"][number], atol=1e-5, rtol=0)


def test_atoms_golden(golden: Path, real_data: Path):
    """Catches coordinates shifted by a residue, on every structure with reference coordinates, bit for bit."""
    store = FeatureStore(real_data / "alignments", real_data / "mmcif_files")
    for key in ("1psm_A", "2crb_A", "2q2k_A", "3u8v_A", "3zee_A", "4i6p_A", "4zey_A", "5kc1_F"):
        pdb_id, chain_id = key.split("_")
        arrays = load(golden / "featurization" / f"mmcif_{pdb_id}.npz")
        sequence = store.chain(key).sequence
        hit = make_hit(sequence[8:], sequence[8:], first_hit=1, key=key)
        found, rejected = template_features(ProteinSequence("piece", sequence[8:]), [hit], store)
        assert rejected == {}
        assert found.sequences == (sequence[8:],)
        np.testing.assert_array_equal(found.aatype[0], arrays[f"{chain_id}/aatype"][8:])
        np.testing.assert_array_equal(found.mask[0], arrays[f"{chain_id}/all_atom_mask"][8:])
        np.testing.assert_array_equal(found.positions[0], arrays[f"{chain_id}/all_atom_positions"][8:])


def test_processed_features_golden(golden: Path):
    """Catches a wrong order of letters, a wrong CB of glycine or of a gap, and padding that is not zero."""
    raw, expected = load(golden / "features_raw_crop.npz"), load(golden / "features_processed.npz")
    found = TemplateFeatures.from_raw(raw).processed()
    assert set(found) == {name for name in expected if name.startswith("template_")}
    for name, value in found.items():
        wanted = expected[name][0]
        padded = np.zeros(wanted.shape, value.dtype)
        padded[tuple(map(slice, value.shape))] = value
        assert value.dtype == wanted.dtype, name
        np.testing.assert_array_equal(padded, wanted, err_msg=name)


def test_raw_round_trip_and_crop_golden(golden: Path):
    """Catches an order of letters that is not its own inverse, and a crop that does not move all arrays alike."""
    full, crop = (load(golden / f"features_raw_{name}.npz") for name in ("full", "crop"))
    cropped = TemplateFeatures.from_raw(full).select(residues=slice(40, 104)).raw()
    for name, value in cropped.items():
        np.testing.assert_array_equal(value, crop[name], err_msg=name)
    swapped = TemplateFeatures.from_raw(full).select(np.array([2, 0]))
    assert swapped.names == ("3zee_A", "4zey_A")
    assert swapped.sum_probs.tolist() == [50, 64]


def test_letters_golden(golden: Path):
    """Catches an order of the raw letters that is not HHblits'."""
    table = load(golden / "residue_constants.npz")["map_hhblits_aatype_to_our_aatype"]
    np.testing.assert_array_equal(encode(HHBLITS_LETTERS), table)


def test_query73(golden: Path, real_data: Path):
    """Catches a real search that does not go through: 1hf9, which is not there, must be counted and named."""
    query = parse_fasta(real_data / "fasta" / "query73.fasta")[0]
    hits = parse_hhr(real_data / "alignments" / "query73_A" / "pdb70_hits.hhr")
    selection = select_hits(hits, query.letters, {}, HitLimits())
    store = FeatureStore(real_data / "alignments", real_data / "mmcif_files")
    found, rejected = template_features(query, selection.kept, store)
    assert found.names == ("3u8v_A", "2crb_A", "4zey_A", "1psm_A", "3zee_A", "4i6p_A", "2q2k_A")
    # Of 5kc1, F and J, the hits pair residues 25 to 41, which have no coordinates.
    for chain_id in "FJ":
        assert not load(golden / "featurization" / "mmcif_5kc1.npz")[f"{chain_id}/all_atom_mask"][24:41].any()
    assert rejected == {
        TemplateRejection.NO_STRUCTURE: ("1hf9_B",),
        TemplateRejection.NO_ATOMS: ("5kc1_F", "5kc1_J"),
    }
    assert rejection_summary(rejected) == (
        "1 hit: no structure (1hf9_B); 2 hits: too few atoms in the aligned residues (5kc1_F, 5kc1_J)"
    )
    assert found.aatype.shape == (7, 73)
    assert (np.diff(found.sum_probs) <= 0).all()
    assert not found.mask[found.aatype == GAP].any()
    assert not found.positions[found.mask == 0].any()
    assert found.sequences[1] == "-" * 10 + "EEAISCHRKATTYLSEAMKL" + "-" * 43
    limited, rejected = template_features(query, selection.kept, store, limit=1)
    assert limited.names == ("3u8v_A",)


def test_gaps_on_both_sides():
    """Catches residues shifted after a gap of the query or of the template, and masks left on in gaps."""
    hit = make_hit("KTA--YIAKQ", "KTAGGY--KQ", first_query=1, first_hit=30)
    found, _ = template_features(QUERY, [hit], Chains(make_chain("SSKTAGGYKQSS")))
    assert found.sequences == ("-KTAY--KQ" + "-" * 23,)
    x = found.positions[0, :9, CA, 0] / np.float32(3.8)
    np.testing.assert_allclose(x, [0, 2, 3, 4, 7, 0, 0, 8, 9], atol=1e-5)
    np.testing.assert_array_equal(found.mask[0, :, CA], [0, 1, 1, 1, 1, 0, 0, 1, 1] + [0] * 23)


def test_hits_of_hmmsearch():
    """Catches a hit whose row holds residues inserted between the query's columns moving what follows them."""
    text = "# STOCKHOLM 1.0\n1abc_A/3-8  --TAggYI" + "-" * 26 + "\n//\n"
    (hit,) = parse_hmmsearch("a.sto", text.encode(), query=LETTERS)
    found, rejected = template_features(QUERY, [hit], Chains(make_chain("MKTAGGYIAK")))
    assert rejected == {}
    assert found.sequences == ("--TAYI" + "-" * 26,)
    np.testing.assert_allclose(found.positions[0, 2:6, CA, 0] / np.float32(3.8), [2, 3, 6, 7], atol=1e-5)


def test_realigned_where_the_structure_lacks_residues():
    """Catches atoms of the wrong residues where a loop is missing from the sequence of the file, or letters differ."""
    theirs = "GS" + LETTERS[:10] + LETTERS[12:20].replace("F", "Y", 1) + LETTERS[20:] + "HHH"
    hit = make_hit(LETTERS, LETTERS)
    found, rejected = template_features(QUERY, [hit], Chains(make_chain(theirs)))
    assert rejected == {}
    assert found.sequences == (LETTERS[:10] + "--" + LETTERS[12:20].replace("F", "Y", 1) + LETTERS[20:],)
    x = found.positions[0, :, CA, 0] / np.float32(3.8)
    np.testing.assert_allclose(x, [*range(2, 12), 0, 0, *range(12, 32)], atol=1e-5)


def test_realignment_limit():
    """Catches the limit of 90 % applied to the wrong length or with the wrong sign."""
    letters = LETTERS[:30]
    assert realign(letters, "GG" + "W" * 3 + letters[3:] + "GG") is not None
    assert realign(letters, "GG" + "W" * 4 + letters[4:] + "GG") is None
    # A file that holds only a piece of the hit: the piece is the shorter one.
    index = realign(letters, letters[10:25])
    assert index is not None
    assert index.tolist() == [-1] * 10 + list(range(15)) + [-1] * 5


def test_x_matches_anything_when_looking_for_the_hit():
    """Catches a modified residue, X on one side, sending the hit to realignment or moving it."""
    assert find_residues("AXD", "ACDAXD") == 3
    assert find_residues("AXD", "GACD") == 1
    assert find_residues("ACD", "GAXD") == 1
    assert find_residues("ACD", "GAGD") is None
    hit = make_hit("MKTAYI", "MXTAYI")
    found, _ = template_features(QUERY, [hit], Chains(make_chain()))
    assert found.aatype[0, 1] == UNKNOWN
    assert found.mask[0, 1].sum() == 5


def with_break(distance: float) -> Chain:
    chain = make_chain()
    positions = chain.positions.copy()
    positions[20:, :, 2] += distance
    return replace(chain, positions=positions)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (Chains(), TemplateRejection.NO_STRUCTURE),
        (Chains(make_chain("W" * 32, key="1abc_B")), TemplateRejection.NO_CHAIN),
        (Chains(make_chain("W" * 32)), TemplateRejection.LOW_IDENTITY),
        (Chains(with_break(151.0)), TemplateRejection.BROKEN_CHAIN),
        (Chains(replace(make_chain(), mask=np.zeros((32, 37), np.float32))), TemplateRejection.NO_ATOMS),
    ],
)
def test_rejections_are_named(source: Chains, reason: TemplateRejection):
    """Catches a useless hit that becomes a template, stops the run, or is dropped without a word."""
    good = make_hit("MKTAY", "MKTAY", key="2xyz_A", score=1.0)
    source.chains["2xyz_A"] = make_chain(key="2xyz_A")
    found, rejected = template_features(QUERY, [make_hit(LETTERS, LETTERS), good], source)
    assert found.names == ("2xyz_A",)
    assert rejected == {reason: ("1abc_A",)}
    assert rejection_summary(rejected) == f"1 hit: {reason.value} (1abc_A)"


def test_a_gap_in_the_coordinates_is_no_broken_chain():
    """Catches zeros of missing residues taken for coordinates: the chain lies 200 Å from the origin."""
    chain = make_chain()
    mask = chain.mask.copy()
    mask[10] = 0
    positions = (chain.positions + np.float32(200)) * mask[..., None]
    found, rejected = template_features(
        QUERY, [make_hit(LETTERS, LETTERS)], Chains(replace(chain, positions=positions, mask=mask))
    )
    assert rejected == {}
    assert found.mask[0, 10].sum() == 0
    assert found.aatype[0, 10] != GAP


def test_best_first_at_most_limit_and_hits_without_score():
    """Catches templates in file order, the limit applied before rejections, and hmmsearch's hits refused."""
    source = Chains(*(make_chain(key=f"{k}abc_A") for k in (1, 2, 3)))
    hits = [
        make_hit("MKTAY", "MKTAY", key=key, score=score)
        for key, score in [("1abc_A", None), ("2abc_A", 3.0), ("9abc_A", 5.0), ("3abc_A", 4.0)]
    ]
    found, rejected = template_features(QUERY, hits, source, limit=2)
    assert found.names == ("3abc_A", "2abc_A")
    assert rejected == {TemplateRejection.NO_STRUCTURE: ("9abc_A",)}
    found, _ = template_features(QUERY, hits, source)
    assert found.names[-1] == "1abc_A"
    assert found.sum_probs.tolist() == [4.0, 3.0, 0.0]
    assert found.raw()["template_sum_probs"].shape == (3, 1)
    assert template_features(QUERY, hits, source, limit=0)[1] == {}


def test_no_templates():
    """Catches axes lost where nothing is left: a query without templates must still give arrays of its length."""
    found, rejected = template_features(QUERY, [], Chains())
    assert (len(found), rejected, rejection_summary(rejected)) == (0, {}, "")
    shapes = {name: value.shape for name, value in found.processed().items()}
    assert shapes["template_all_atom_positions"] == (0, 32, 37, 3)
    assert shapes["template_mask"] == (0,)
    assert found.raw()["template_aatype"].shape == (0, 32, 22)
    assert TemplateFeatures.from_raw(found.raw()).aatype.shape == (0, 32)


@pytest.mark.parametrize(
    ("hit", "limit", "message"),
    [
        (
            make_hit("MKTAW", "MKTAY"),
            20,
            r"hit '1abc_A': its query has 'W' at position 5, 'q' has 'Y' \(1 positions differ",
        ),
        (make_hit("MKTAY", "MKTAY", first_query=28), 20, "aligned to residue 33 of the query, 'q' has 32"),
        (make_hit("MKTAY", "MKTAY"), -1, "the limit of templates is -1; give 0 or more"),
    ],
)
def test_bad_input(hit: TemplateHit, limit: int, message: str):
    """Catches templates of another query's search used in silence."""
    with pytest.raises(UserError, match=message) as caught:
        template_features(QUERY, [hit], Chains(make_chain()), limit)
    assert "\n" not in str(caught.value)


def test_broken_files_stop_the_run(tmp_path: Path):
    """Catches a truncated or unreadable structure counted as a missing one."""
    (tmp_path / "1abc.cif").write_text("data_1ABC\nloop_\n_atom_site.Cartn_x\n")
    hit = make_hit("MKTAY", "MKTAY")
    with pytest.raises(FileFormatError, match=r"1abc\.cif"):
        template_features(QUERY, [hit], FeatureStore(tmp_path, tmp_path))
    unreadable = UserError("1abc.cif: cannot be read")
    unreadable.__cause__ = PermissionError()
    with pytest.raises(UserError, match="cannot be read"):
        template_features(QUERY, [hit], Chains(error=unreadable))


def test_a_chain_that_the_file_lacks(real_data: Path):
    """Catches a chain of a real entry that is not there (or is no protein) stopping the run."""
    store = FeatureStore(real_data / "alignments", real_data / "mmcif_files")
    assert isinstance(store, ChainSource)
    _, rejected = template_features(QUERY, [make_hit("MKTAY", "MKTAY", key="4zey_Z")], store)
    assert rejected == {TemplateRejection.NO_CHAIN: ("4zey_Z",)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"template_sum_probs": None}, "raw template features lack template_sum_probs"),
        ({"template_all_atom_masks": np.zeros((1, 31, 37))}, r"expected \(\(1, 32, 22\)"),
        ({"template_sum_probs": np.zeros((2, 1))}, "with 1 sum_probs \\(found 2\\)"),
    ],
)
def test_raw_features_that_do_not_fit(change: dict, message: str):
    """Catches a raw file with a missing or misshapen array that fails later, far from its cause."""
    found, _ = template_features(QUERY, [make_hit("MKTAY", "MKTAY")], Chains(make_chain()))
    raw = {name: value for name, value in {**found.raw(), **change}.items() if value is not None}
    with pytest.raises(UserError, match=message) as caught:
        TemplateFeatures.from_raw(raw)
    assert "\n" not in str(caught.value)


def test_frozen_and_picklable():
    """Catches a record that workers cannot send, or whose arrays need not go together."""
    found, _ = template_features(QUERY, [make_hit("MKTAY", "MKTAY")], Chains(make_chain()))
    assert pickle.loads(pickle.dumps(found)).names == ("1abc_A",)
    with pytest.raises(ValueError, match="aatype"):
        replace(found, names=())
