"""OpenFold3's alignments of a chain in one archive: the same as from files, and nothing of a pickle is run."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from evodsp.cli import main
from evodsp.data.formats import parse_preparsed
from evodsp.data.index.data_index import DataIndex
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.sources.layout import parse_alignment_file, read_alignment_dir
from evodsp.errors import FileFormatError
from evodsp.inference.targets import find_targets
from evodsp.reading import text_files
from tests.builders.alignments import make_alignment, preparsed
from tests.builders.training_chains import SEQUENCES, write_chain

LETTERS = "ACDEFW"
ALIGNMENTS = {name: make_alignment(LETTERS, rows) for name, rows in (("uniref90_hits", 5), ("bfd_hits", 7))}


def entry(letters: object, deletions: object) -> bytes:
    """The content of one entry, as `numpy.save` writes it."""
    content = np.array({"msa": letters, "deletion_matrix": deletions, "metadata": np.array(["q", "h"])}, object)
    np.save(file := io.BytesIO(), content)
    return file.getvalue()


GOOD = entry(np.array([list("ACD"), list("A-w")]), np.array([[0, 0, 0], [1, 0, 2]]))
HEADER = GOOD[: GOOD.index(b"\n") + 1]


def archive(path: Path, content: bytes, name: str = "bfd_hits.npy") -> Path:
    """An archive with one entry."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, content)
    return path


def test_an_archive_equals_the_files(tmp_path: Path) -> None:
    """Catches rows, letters or deletions that differ, another order, and sequences for pairing in the MSA."""
    path = preparsed(tmp_path / "1abc_A.npz", {**ALIGNMENTS, "uniprot_hits": make_alignment("WWWW")})
    found = parse_alignment_file(path)
    for one, expected in zip(found, (ALIGNMENTS["bfd_hits"], ALIGNMENTS["uniref90_hits"]), strict=True):
        np.testing.assert_array_equal(one.residues, expected.residues)
        np.testing.assert_array_equal(one.deletions, expected.deletions)
    assert [alignment.source for alignment in found] == [f"{path}:bfd_hits", f"{path}:uniref90_hits"]
    (lower,) = parse_preparsed(archive(tmp_path / "x.npz", GOOD))
    assert (lower.residues.tolist(), lower.deletions.tolist()) == ([[0, 4, 3], [0, 21, 17]], [[0, 0, 0], [1, 0, 2]])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (np.array(["q", "sp|P12345|X_BOVIN"]), ("q", "sp|P12345|X_BOVIN")),
        (np.array(["q"]), ("row 1", "row 2")),
        (np.array([1.0, 2.0]), ("row 1", "row 2")),
        (np.array([[None, "h"]], object), ("row 1", "row 2")),
        (np.frombuffer(b"\xff" * 8, np.uint32).view("<U1"), ("row 1", "row 2")),
        (None, ("row 1", "row 2")),
    ],
)
def test_names_of_rows(tmp_path: Path, names: object, expected: tuple[str, ...]) -> None:
    """Catches rows without the names that say their species, and an archive that is refused for names of another kind."""
    content = {"msa": np.array([list("ACD"), list("A-w")]), "deletion_matrix": np.zeros((2, 3), int), "metadata": names}
    np.save(file := io.BytesIO(), np.array(content, object))
    (found,) = parse_preparsed(archive(tmp_path / "x.npz", file.getvalue()))
    assert found.names == expected


def test_archives_of_other_versions_of_numpy(tmp_path: Path) -> None:
    """Catches an archive refused because of the protocol, the module's old name, or the order of bytes or of axes."""
    letters = np.asfortranarray(np.array([list("ACD"), list("A-w")]).astype(">U1"))
    content = {"msa": letters, "deletion_matrix": np.array([[0, 0, 0], [1, 0, 2]], ">i4")}
    data = pickle.dumps(np.array(content, object), protocol=3)
    assert b"numpy._core.multiarray\n" in data or b"numpy.core.multiarray\n" in data
    for old in (data, data.replace(b"numpy._core.", b"numpy.core.")):
        (found,) = parse_preparsed(archive(tmp_path / "x.npz", HEADER + old))
        assert (found.residues.tolist(), found.deletions.tolist()) == (
            [[0, 4, 3], [0, 21, 17]],
            [[0, 0, 0], [1, 0, 2]],
        )


@pytest.mark.parametrize("place", ["{key}.npz", "{key}/alignment.npz"])
def test_index_doctor_and_build_read_them(tmp_path: Path, place: str) -> None:
    """Catches chains with an archive beside the folders, or in their folder, that one of the readers does not see."""
    for key, letters in SEQUENCES.items():
        write_chain(tmp_path, key, letters)
    expected = ChainFiles(tmp_path / "alignments", tmp_path / "mmcif_files")
    for key in SEQUENCES:
        preparsed(
            tmp_path / "npz" / place.format(key=key),
            {Path(one.source).stem: one for one in expected.alignments(key)},
        )
    roots = ["--alignment_dir", str(tmp_path / "npz"), "--structure_dir", str(tmp_path / "mmcif_files"), "--workers=0"]
    assert main(["data", "index", *roots, "--output", str(tmp_path / "index")]) == 0
    indexed = [*roots, "--index", str(tmp_path / "index")]
    assert main(["data", "doctor", *indexed, "--output", str(tmp_path / "doctor")]) == 0
    report = json.loads((tmp_path / "doctor" / "doctor.json").read_text())
    assert report["summary"]["training chains that can be used"] == "2 of 2"
    assert main(["data", "build", *roots[:-1], "--workers=1", "--output", str(tmp_path / "store")]) == 0
    index = DataIndex(tmp_path / "index")
    folders = (tmp_path / "npz", tmp_path / "mmcif_files")
    stores = (ChainFiles(*folders), ChainFiles(*folders, index), FeatureStore(str(tmp_path / "store")))
    for store in stores:
        assert store.keys() == list(SEQUENCES)
        for key in SEQUENCES:
            found, wanted = (
                store.parsed(key, with_hits=True).chains[0].msa,
                expected.parsed(key, with_hits=True).chains[0].msa,
            )
            np.testing.assert_array_equal(found.msa, wanted.msa)
            np.testing.assert_array_equal(found.deletions, wanted.deletions)
    assert not any(index.differs(key, folders[0]) for key in SEQUENCES)
    preparsed(folders[0] / place.format(key="1abc_A"), ALIGNMENTS)
    assert index.differs("1abc_A", folders[0])


def test_prediction_finds_an_archive(tmp_path: Path) -> None:
    """Catches a target without alignments, although OpenFold3's archive of its name is there."""
    (tmp_path / "q.fasta").write_text(f">mine\n{LETTERS}\n>other\n{LETTERS}\n")
    for name in ("mine.npz", "other/alignment.npz"):
        preparsed(tmp_path / "alignments" / name, ALIGNMENTS)
    for target in find_targets([tmp_path / "q.fasta"], tmp_path / "alignments")[0]:
        assert [len(one) for one in read_alignment_dir(target.alignments, target.query)] == [5, 7]


def call(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls module.name(argument)."""
    return f"c{module}\n{name}\nX".encode() + struct.pack("<I", len(argument)) + argument.encode() + b"\x85R."


def array_of(code: object, shape: object, data: object) -> bytes:
    """A pickle of a dictionary whose `msa` has a made-up type and shape."""

    class Made:
        def __init__(self, reduced: tuple[object, ...]) -> None:
            self.reduced = reduced

        def __reduce__(self) -> tuple[object, ...]:
            return self.reduced

    kind = Made((np.dtype, (code, False, True), (3, "<", None, None, None, -1, -1, 0)))
    function, arguments, _ = np.zeros(1).__reduce__()  # type: ignore[misc]
    made = Made((function, arguments, (1, shape, kind, False, data)))
    content = np.empty((), object)
    content[()] = {"msa": made, "deletion_matrix": np.zeros((1, 1), int)}
    return HEADER + pickle.dumps(content, protocol=3)


HOSTILE = {
    "a command": (HEADER + b"\x80\x04" + call("os", "system", "touch ran"), r"asks to call 'os\.system'"),
    "a function of NumPy": (HEADER + b"\x80\x04" + call("numpy", "fromfile", "ran"), r"asks to call 'numpy\.fromfile'"),
    "a name with dots": (
        HEADER + b"\x80\x04\x8c\x05numpy\x8c\x0btesting.run\x93.",
        r"asks to call 'numpy\.testing\.run'",
    ),
    "an extension": (HEADER + b"\x80\x04\x82\x01.", "unregistered extension"),
    "a shape of long words": (array_of("U1", ("a" * 10_000_000,), b"A\0\0\0"), r"\('a{20,40}\.\.\.a{20,40}',\); make"),
    "cut": (GOOD[:-20], "Ran out of input|truncated"),
    "another dictionary": (
        HEADER + GOOD[len(HEADER) :].replace(b"deletion_matrix", b"deletion_matrox"),
        "no dictionary",
    ),
    "letters of a larger shape": (array_of("U1", (1 << 40, 4), b"A\0\0\0"), "cannot reshape"),
    "objects from bytes": (array_of("O8", (1, 1), b"\1" * 8), "array of type 'O8'"),
    "whole words": (entry(np.array([["AC", "D"]]), np.zeros((1, 2), int)), "letters of shape"),
    "another character": (
        entry(np.array([["A", "é"]]), np.zeros((1, 2), int)),
        "character number 233 in row 1, column 2",
    ),
    "fewer deletions": (
        entry(np.array([["A", "C"]]), np.zeros((1, 1), int)),
        r"shape \(1, 2\), deletions of shape \(1, 1\)",
    ),
    "deletions below zero": (entry(np.array([["A", "C"]]), np.array([[0, -1]])), "deletions from -1 to 0"),
    "deletions of 2^40": (entry(np.array([["A", "C"]]), np.array([[0, 1 << 40]])), "deletions from 0 to"),
    "several objects": (HEADER.replace(b"(), ", b"(9,)") + GOOD[len(HEADER) :], "its header is not"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_are_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a command that runs, a crash of NumPy, and a traceback."""
    monkeypatch.chdir(tmp_path)
    content, message = HOSTILE[name]
    with pytest.raises(FileFormatError, match=message) as error:
        parse_preparsed(archive(tmp_path / "x.npz", content))
    assert str(error.value).startswith(f"{tmp_path / 'x.npz'}:bfd_hits: not an alignment as") or "deletions" in message
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_archives_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bomb that fills the memory, and errors of zipfile that reach the user as tracebacks."""
    path = archive(tmp_path / "x.npz", GOOD)
    data = path.read_bytes()
    listed = data.index(b"PK\x01\x02")
    newer = data[: listed + 6] + b"\xc3" + data[listed + 7 :]  # a version of the format that there is not
    for damaged in (b"", b"PK", data[:-40], newer, data.replace(b"bfd_hits", b"bfd_hitz", 1)):
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError, match=r"x\.npz: not a readable NumPy archive"):
            parse_preparsed(path)
    encrypted = data.replace(b"PK\x03\x04\x14\x00\x00", b"PK\x03\x04\x14\x00\x01").replace(
        b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01"
    )
    path.write_bytes(encrypted)
    with pytest.raises(FileFormatError, match=r"not a readable NumPy archive .*encrypted"):
        parse_preparsed(path)
    path.write_bytes(data)
    monkeypatch.setattr(text_files, "LARGEST_UNPACKED", len(GOOD) - 1)
    with pytest.raises(FileFormatError, match="unpacks to more than"):
        parse_preparsed(path)
    assert parse_preparsed(path, is_wanted=lambda name: name != "bfd_hits") == []


def test_damaged_pickles(tmp_path: Path) -> None:
    """Catches an exception of the unpickler, or of NumPy, that no one expected."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        content = bytearray(GOOD)
        for at in generator.integers(0, len(GOOD), generator.integers(1, 4)):
            content[at] = generator.integers(0, 256)
        with suppress(FileFormatError):
            (found,) = parse_preparsed(archive(tmp_path / "x.npz", bytes(content)))
            assert found.residues.shape == found.deletions.shape
