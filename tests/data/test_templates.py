"""Template features: golden parity from real structure files, query73_A end to end, realignment and every rejection."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.formats import parse_fasta, parse_hhr, parse_hmmsearch
from evodsp.data.records import Chain, ProteinSequence
from evodsp.data.sources.structures import StructureFolder
from evodsp.data.templates.features import TemplateRejection, match_hit, realign, template_features
from evodsp.data.templates.hits import HitLimits, TemplateHit, select_hits
from evodsp.errors import FileFormatError, UserError
from evodsp.geometry.residues import CA, GAP, UNKNOWN, N, decode, encode
from tests.builders.chains import straight_chain
from tests.builders.templates import (
    HHBLITS_LETTERS,
    LETTERS,
    QUERY,
    MemoryStructures,
    from_raw,
    make_hit,
)
from tests.shared import load


def test_features_golden(golden: Path, real_data: Path):
    """Catches any difference from AF2's raw features of real files: letters, columns, masks.

    The golden templates were moved so that their first N lies at (4, 0, 0): moved back, in float32, hence the 1e-5.
    """
    expected = load(golden / "features_raw_full.npz")
    query = parse_fasta(real_data / "fasta" / "6kwc.fasta")[0]
    store = StructureFolder(real_data / "mmcif_files")
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
    wanted = from_raw(expected)
    assert rejected == {}
    assert found.names == wanted.names
    assert list(map(decode, found.aatype)) == [row.decode() for row in expected["template_sequence"]]
    for name in ("aatype", "mask", "sum_probs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)
    for number, hit in enumerate(hits):
        column = hit.indices_query[0]
        here, mask = found.positions[number], found.mask[number, ..., None]
        moved = (here - here[column, N] + np.array([4, 0, 0], np.float32)) * mask
        np.testing.assert_allclose(moved, wanted.positions[number], atol=1e-5, rtol=0)


def test_atoms_golden(golden: Path, real_data: Path):
    """Catches coordinates shifted by a residue, on every structure with reference coordinates, bit for bit."""
    store = StructureFolder(real_data / "mmcif_files")
    for key in ("1psm_A", "2crb_A", "2q2k_A", "3u8v_A", "3zee_A", "4i6p_A", "4zey_A", "5kc1_F"):
        pdb_id, chain_id = key.split("_")
        arrays = load(golden / "featurization" / f"mmcif_{pdb_id}.npz")
        sequence = store.chain(key).sequence
        hit = make_hit(sequence[8:], sequence[8:], first_hit=1, key=key)
        found, rejected = template_features(ProteinSequence("piece", sequence[8:]), [hit], store)
        assert rejected == {}
        assert list(map(decode, found.aatype)) == [sequence[8:]]
        np.testing.assert_array_equal(found.aatype[0], arrays[f"{chain_id}/aatype"][8:])
        np.testing.assert_array_equal(found.mask[0], arrays[f"{chain_id}/all_atom_mask"][8:])
        np.testing.assert_array_equal(found.positions[0], arrays[f"{chain_id}/all_atom_positions"][8:])


def test_processed_features_golden(golden: Path):
    """Catches a wrong order of letters, a wrong CB of glycine or of a gap, and padding that is not zero."""
    raw, expected = load(golden / "features_raw_crop.npz"), load(golden / "features_processed.npz")
    found = from_raw(raw).processed()
    assert set(found) == {name for name in expected if name.startswith("template_")}
    for name, value in found.items():
        wanted = expected[name][0]
        padded = np.zeros(wanted.shape, value.dtype)
        padded[tuple(map(slice, value.shape))] = value
        assert value.dtype == wanted.dtype, name
        np.testing.assert_array_equal(padded, wanted, err_msg=name)


def test_crop_golden(golden: Path):
    """Catches a crop or a selection that does not treat all arrays alike."""
    full, crop = (from_raw(load(golden / f"features_raw_{name}.npz")) for name in ("full", "crop"))
    cropped = full.select(residues=slice(40, 104))
    for name, value in vars(crop).items():
        np.testing.assert_array_equal(getattr(cropped, name), value, err_msg=name)
    swapped = full.select(np.array([2, 0]))
    assert swapped.names == ("3zee_A", "4zey_A")
    assert swapped.sum_probs.tolist() == [50, 64]


def test_letters_golden(golden: Path):
    """Catches an order of the raw letters that is not HHblits'."""
    table = load(golden / "residue_constants.npz")["map_hhblits_aatype_to_our_aatype"]
    np.testing.assert_array_equal(encode(HHBLITS_LETTERS), table)


def test_query73(golden: Path, real_data: Path):
    """Catches a real search that fails: 1hf9, whose file is missing, must be counted and named."""
    query = parse_fasta(real_data / "fasta" / "query73.fasta")[0]
    hits = parse_hhr(real_data / "alignments" / "query73_A" / "pdb70_hits.hhr")
    selection = select_hits(hits, query.letters, bool, lambda _: None, HitLimits())
    store = StructureFolder(real_data / "mmcif_files")
    found, rejected = template_features(query, selection.kept, store)
    assert found.names == ("3u8v_A", "2crb_A", "4zey_A", "1psm_A", "3zee_A", "4i6p_A", "2q2k_A")
    # The hits of 5kc1_F and 5kc1_J are aligned to residues 25 to 41, which have no coordinates.
    for chain_id in "FJ":
        assert not load(golden / "featurization" / "mmcif_5kc1.npz")[f"{chain_id}/all_atom_mask"][24:41].any()
    assert rejected == {
        TemplateRejection.NO_STRUCTURE: ("1hf9_B",),
        TemplateRejection.NO_ATOMS: ("5kc1_F", "5kc1_J"),
    }
    assert found.aatype.shape == (7, 73)
    assert (np.diff(found.sum_probs) <= 0).all()
    assert not found.mask[found.aatype == GAP].any()
    assert not found.positions[found.mask == 0].any()
    assert decode(found.aatype[1]) == "-" * 10 + "EEAISCHRKATTYLSEAMKL" + "-" * 43
    limited, rejected = template_features(query, selection.kept, store, limit=1)
    assert limited.names == ("3u8v_A",)


def test_gaps_on_both_sides():
    """Catches residues shifted after a gap of the query or of the template, and masks left on in gaps."""
    hit = make_hit("KTA--YIAKQ", "KTAGGY--KQ", first_query=1, first_hit=30)
    found, _ = template_features(QUERY, [hit], MemoryStructures(straight_chain("SSKTAGGYKQSS")))
    assert list(map(decode, found.aatype)) == ["-KTAY--KQ" + "-" * 23]
    x = found.positions[0, :9, CA, 0] / np.float32(3.8)
    np.testing.assert_allclose(x, [0, 2, 3, 4, 7, 0, 0, 8, 9], atol=1e-5)
    np.testing.assert_array_equal(found.mask[0, :, CA], [0, 1, 1, 1, 1, 0, 0, 1, 1] + [0] * 23)


def test_hits_of_hmmsearch():
    """Catches residues inserted between the query's columns that shift the following ones."""
    text = "# STOCKHOLM 1.0\n1abc_A/3-8  --TAggYI" + "-" * 26 + "\n//\n"
    (hit,) = parse_hmmsearch("a.sto", text.encode(), query=LETTERS)
    found, rejected = template_features(QUERY, [hit], MemoryStructures(straight_chain("MKTAGGYIAK")))
    assert rejected == {}
    assert list(map(decode, found.aatype)) == ["--TAYI" + "-" * 26]
    np.testing.assert_allclose(found.positions[0, 2:6, CA, 0] / np.float32(3.8), [2, 3, 6, 7], atol=1e-5)


def test_copies_that_hmmsearch_found_are_one_template():
    """Catches four slots with one structure, hits of HHsearch that are compared, and a hit without atoms that hides others."""
    keys = ("1abc_A", "1abc_B", "2abc_A", "3abc_A")
    letters = {"3abc_A": LETTERS[:8] + "W" + LETTERS[9:]}
    chains = [straight_chain(letters.get(key, LETTERS), key) for key in keys]
    empty = replace(chains[0], mask=np.zeros_like(chains[0].mask))
    for score, expected in ((None, ("1abc_B", "3abc_A")), (10.0, keys[1:])):
        hits = [make_hit(LETTERS, letters.get(key, LETTERS), key=key, score=score) for key in keys]
        found, rejected = template_features(QUERY, hits, MemoryStructures(empty, *chains[1:]))
        assert found.names == expected
        assert rejected[TemplateRejection.NO_ATOMS] == ("1abc_A",)


def test_realigned_where_the_structure_lacks_residues():
    """Catches atoms of the wrong residues if the file's sequence lacks a loop or has other letters."""
    theirs = "GS" + LETTERS[:10] + LETTERS[12:20].replace("F", "Y", 1) + LETTERS[20:] + "HHH"
    hit = make_hit(LETTERS, LETTERS)
    found, rejected = template_features(QUERY, [hit], MemoryStructures(straight_chain(theirs)))
    assert rejected == {}
    assert list(map(decode, found.aatype)) == [LETTERS[:10] + "--" + LETTERS[12:20].replace("F", "Y", 1) + LETTERS[20:]]
    x = found.positions[0, :, CA, 0] / np.float32(3.8)
    np.testing.assert_allclose(x, [*range(2, 12), 0, 0, *range(12, 32)], atol=1e-5)


def test_realignment_limit():
    """Catches the limit of 90 % applied to the wrong length or with the wrong sign."""
    letters = LETTERS[:30]
    assert realign(letters, "GG" + "W" * 3 + letters[3:] + "GG") is not None
    assert realign(letters, "GG" + "W" * 4 + letters[4:] + "GG") is None
    # A file that has only a piece of the hit: the piece is the shorter sequence.
    index = realign(letters, letters[10:25])
    assert index is not None
    assert index.tolist() == [-1] * 10 + list(range(15)) + [-1] * 5


def test_x_is_no_identical_residue():
    """Catches unknown residues that count as equal ones: two sequences of X would be one protein."""
    letters = LETTERS[:30]
    assert realign("XXX" + letters[3:], "XXX" + letters[3:]) is not None
    assert realign("XXXX" + letters[4:], "XXXX" + letters[4:]) is None
    assert realign("XXXX" + letters[4:], letters) is None
    assert realign(letters, "XXXX" + letters[4:]) is None


def test_x_matches_anything_when_looking_for_the_hit():
    """Catches a modified residue (X on one side) that prevents the match or shifts it."""
    for piece, sequence, start in (("AXD", "ACDAXD", 3), ("AXD", "GACD", 1), ("ACD", "GAXD", 1)):
        matched = match_hit(make_hit(piece, piece), MemoryStructures(straight_chain(sequence)))
        assert matched.index.tolist() == [start, start + 1, start + 2]
    rejected = match_hit(make_hit("ACD", "ACD"), MemoryStructures(straight_chain("GAGD")))
    assert rejected is TemplateRejection.LOW_IDENTITY
    hit = make_hit("MKTAYI", "MXTAYI")
    found, _ = template_features(QUERY, [hit], MemoryStructures(straight_chain(LETTERS)))
    assert found.aatype[0, 1] == UNKNOWN
    assert found.mask[0, 1].sum() == 5


def with_break(distance: float) -> Chain:
    chain = straight_chain(LETTERS)
    positions = chain.positions.copy()
    positions[20:, :, 2] += distance
    return replace(chain, positions=positions)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (MemoryStructures(), TemplateRejection.NO_STRUCTURE),
        (MemoryStructures(straight_chain("W" * 32, key="1abc_B")), TemplateRejection.NO_CHAIN),
        (MemoryStructures(straight_chain("W" * 32)), TemplateRejection.LOW_IDENTITY),
        (MemoryStructures(with_break(151.0)), TemplateRejection.BROKEN_CHAIN),
        (
            MemoryStructures(replace(straight_chain(LETTERS), mask=np.zeros((32, 37), np.float32))),
            TemplateRejection.NO_ATOMS,
        ),
    ],
)
def test_rejections_are_named(source: MemoryStructures, reason: TemplateRejection):
    """Catches an unusable hit that becomes a template, stops the run, or is dropped without a reason."""
    good = make_hit("MKTAY", "MKTAY", key="2xyz_A", score=1.0)
    source.chains["2xyz_A"] = straight_chain(LETTERS, key="2xyz_A")
    found, rejected = template_features(QUERY, [make_hit(LETTERS, LETTERS), good], source)
    assert found.names == ("2xyz_A",)
    assert rejected == {reason: ("1abc_A",)}


def test_a_gap_in_the_coordinates_is_no_broken_chain():
    """Catches zeros of missing residues read as coordinates: the chain is 200 Å from the origin."""
    chain = straight_chain(LETTERS)
    mask = chain.mask.copy()
    mask[10] = 0
    positions = (chain.positions + np.float32(200)) * mask[..., None]
    found, rejected = template_features(
        QUERY, [make_hit(LETTERS, LETTERS)], MemoryStructures(replace(chain, positions=positions, mask=mask))
    )
    assert rejected == {}
    assert found.mask[0, 10].sum() == 0
    assert found.aatype[0, 10] != GAP


def test_best_first_at_most_limit_and_hits_without_score():
    """Catches templates in file order, the limit applied before rejections, and hmmsearch's hits refused."""
    source = MemoryStructures(*(straight_chain(LETTERS, key=f"{k}abc_A") for k in (1, 2, 3)))
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
    assert template_features(QUERY, hits, source, limit=0)[1] == {}


def test_no_templates():
    """Catches lost axes: a query without templates must still give arrays of its length."""
    found, rejected = template_features(QUERY, [], MemoryStructures())
    assert (len(found), rejected) == (0, {})
    shapes = {name: value.shape for name, value in found.processed().items()}
    assert shapes["template_all_atom_positions"] == (0, 32, 37, 3)
    assert shapes["template_mask"] == (0,)


@pytest.mark.parametrize(
    ("hit", "limit", "message"),
    [
        (
            make_hit("MKTAW", "MKTAY"),
            20,
            r"hit '1abc_A': its query has 'W' at position 5, 'q' has 'Y' \(1 position differs\); search again",
        ),
        (make_hit("MKTAY", "MKTAY", first_query=28), 20, "aligned to residue 33 of the query, 'q' has 32"),
        (make_hit("MKTAY", "MKTAY"), -1, "the limit of templates is -1; give 0 or more"),
    ],
)
def test_bad_input(hit: TemplateHit, limit: int, message: str):
    """Catches hits of another query's search that are used silently."""
    with pytest.raises(UserError, match=message) as caught:
        template_features(QUERY, [hit], MemoryStructures(straight_chain(LETTERS)), limit)
    assert "\n" not in str(caught.value)


def test_broken_files_stop_the_run(tmp_path: Path):
    """Catches a truncated or unreadable structure treated as a missing one."""
    (tmp_path / "1abc.cif").write_text("data_1ABC\nloop_\n_atom_site.Cartn_x\n")
    hit = make_hit("MKTAY", "MKTAY")
    with pytest.raises(FileFormatError, match=r"1abc\.cif"):
        template_features(QUERY, [hit], StructureFolder(tmp_path))
    unreadable = UserError("1abc.cif: cannot be read")
    unreadable.__cause__ = PermissionError()
    with pytest.raises(UserError, match="cannot be read"):
        template_features(QUERY, [hit], MemoryStructures(error=unreadable))


def test_a_chain_that_the_file_lacks(real_data: Path):
    """Catches a missing (or non-protein) chain of a real entry that stops the run."""
    store = StructureFolder(real_data / "mmcif_files")
    _, rejected = template_features(QUERY, [make_hit("MKTAY", "MKTAY", key="4zey_Z")], store)
    assert rejected == {TemplateRejection.NO_CHAIN: ("4zey_Z",)}


def test_frozen_and_picklable():
    """Catches a record that cannot be pickled, or whose arrays need not fit together."""
    found, _ = template_features(QUERY, [make_hit("MKTAY", "MKTAY")], MemoryStructures(straight_chain(LETTERS)))
    assert pickle.loads(pickle.dumps(found)).names == ("1abc_A",)
    with pytest.raises(ValueError, match="aatype"):
        replace(found, names=())
