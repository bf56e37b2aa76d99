"""The feature store: records restore every bit, samples equal those from files, damage is one line."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from evodsp.config import FeatureConfig
from evodsp.data.build import build
from evodsp.data.complexes.merging import find_templates
from evodsp.data.complexes.pairing import BY_ENTRY
from evodsp.data.config import BuildConfig
from evodsp.data.records import COMPLEXES, Assembly, ProteinSequence
from evodsp.data.samples.dataset import SampleDataset
from evodsp.data.sources.chain_files import ChainFiles, Store
from evodsp.data.sources.feature_store import (
    FeatureStore,
    decode_chain,
    decode_record,
    digest_of,
    encode_chain,
    encode_record,
    packed,
    unpacked,
)
from evodsp.data.sources.msa import MsaFeatures, letter_profile
from evodsp.data.sources.opening import ComplexFiles
from evodsp.data.sources.parsed import ChainMsas, Parsed, RecordSource
from evodsp.data.sources.structures import TemplateStructures
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import FileFormatError, UserError
from evodsp.geometry.residues import encode
from evodsp.training.chains import find_chains
from evodsp.training.config import DataConfig
from tests.builders.builds import config, content, letters_of, write_chain, write_structure
from tests.builders.chains import make_chain, straight_chain
from tests.builders.complex_files import write_shortened
from tests.builders.records import same
from tests.builders.templates import make_hit

SAMPLES = FeatureConfig(crop_size=12, msa_clusters=6, extra_msa=7, recycles=1, max_templates=3)
WHOLE = replace(SAMPLES, crop_size=None)
OBSOLETE = f"{'OBSLTE    01-JAN-01':<20}{'9OLD':<9}9NEW\n"


def odd_chain() -> Parsed:
    """A chain with everything that is rare."""
    chain = straight_chain("ACDEFGHIKLXW", "1abc_A")
    chain = replace(
        chain, insertion_code=("", "A", "'", *[""] * 9), is_missing=np.arange(12) % 5 == 0, resolution=2.05,
        method="x-ray diffraction, neutron diffraction", release_date=date(1976, 5, 19),
    )  # fmt: skip
    msa = np.arange(36, dtype=np.int8).reshape(3, 12) % 22
    msa[0] = encode(chain.sequence)
    deletions = np.zeros((3, 12), np.int32)
    deletions[0, 0], deletions[2, 11], deletions[1, 3] = 1, 70_000, 300
    hits = (make_hit("AC-D", "GGGD", key="2xyz_B"), replace(make_hit("ACD", "A-D"), sum_probs=None, name="ünï"))
    msas = ChainMsas(ProteinSequence("1abc_A", chain.sequence), MsaFeatures(msa, deletions, letter_profile(msa)))
    return Parsed(Assembly.of_chain("1abc_A", chain), (msas,), {chain.sequence: hits})


def test_a_record_restores_every_bit() -> None:
    """Catches a field left out, narrowed or shifted, and equal chains with different bytes."""
    odd, empty = odd_chain(), make_chain("1abc", "ARND", resolved=False, resolution=None)
    no_atoms = replace(empty, positions=np.zeros_like(empty.positions))  # without the signs of its zeros
    same(decode_record(encode_record(odd), with_hits=True), odd)
    same(decode_record(encode_record(odd), with_hits=False), replace(odd, hits={}))
    for chain in (odd.assembly.chains[0], no_atoms):
        same(decode_chain(encode_chain(chain)), chain)
    assert encode_record(decode_record(encode_record(odd), with_hits=True)) == encode_record(odd)


def test_an_atom_outside_the_mask_is_not_lost() -> None:
    """Catches positions dropped silently: the record keeps those of existing atoms only."""
    chain = straight_chain("AC")
    chain.positions[0, 36] = 1
    with pytest.raises(ValueError, match="does not exist has a position"):
        encode_chain(chain)


# Samples -----------------------------------------------------------------------------------------------------------------

LETTERS = {"1abc_A": letters_of(3), "2abc_A": letters_of(4), "3abc_A": letters_of(6)}
HITS = (
    "# STOCKHOLM 1.0\n2abc_A/1-15  {0}\n7abc_A/2-16  {1}\n8abc_C/1-15  {2}\n9old_A/1-15  {3}\n1abc_A/1-15  {2}\n"
    "0abc_A/1-15  {2}\n//\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three chains. The hits of 1abc_A are of 1999, 2004, 2009 (renamed chain), withdrawn, its own, and not there."""
    root = tmp_path_factory.mktemp("files")
    aligned = [letters_of(seed)[:15] for seed in (4, 7, 9, 10)]  # of hits with the same residues one is a template
    write_chain(root, "1abc_A", LETTERS["1abc_A"], "2010-05-05", HITS.format(*aligned))
    write_chain(root, "2abc_A", LETTERS["2abc_A"], "1999-01-01")
    write_chain(root, "3abc_A", LETTERS["3abc_A"], "2020-01-01")
    templates = root / "templates"
    templates.mkdir()
    shutil.copy(root / "mmcif_files" / "2abc.cif", templates)
    write_structure(templates, "7abc_A", f"W{aligned[1]}WW", "2004-01-01")
    write_structure(templates, "8ABC_B", f"{aligned[2]}WW", "2009-01-01")
    write_structure(templates, "9new_A", aligned[3], "2030-01-01")
    (root / "mmcif_cache.json").write_text('{"9new": {"release_date": "2001-01-01"}}')
    (root / "obsolete.dat").write_text(OBSOLETE)
    return root


@pytest.fixture(scope="module")
def store(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("built") / "store"
    build(config(folder, output, template_structure_dir=folder / "templates", obsolete=folder / "obsolete.dat"))
    assert (output / "failed.jsonl").read_text() == ""
    return output


def files_of(folder: Path) -> ChainFiles:
    return ChainFiles(folder / "alignments", folder / "mmcif_files")


@pytest.mark.parametrize("latest", [None, date(2005, 1, 1), date(2002, 1, 1), date(1990, 1, 1)])
def test_samples_equal_those_from_files(folder: Path, store: Path, latest: date | None) -> None:
    """Catches any bit of a feature, a label or a template that differs, at every cut-off date."""
    from_files = TemplateSource.open(folder / "templates", latest, folder / "obsolete.dat")
    built = FeatureStore(str(store))
    numbers = set()
    for settings, training in ((SAMPLES, True), (WHOLE, False)):
        pair = [
            SampleDataset(source, list(LETTERS), settings, 5, training, templates=templates)
            for source, templates in ((files_of(folder), from_files), (built, built.template_source(latest)))
        ]
        for index in range(9 if training else 3):
            expected, found = pair[0][index], pair[1][index]
            assert expected.keys() == found.keys()
            for name, value in expected.items():
                assert value.dtype == found[name].dtype, name
                assert torch.equal(value, found[name]), name
            numbers.add(int(expected["template_mask"][0].sum()))
    assert max(numbers) == {None: 3, 2005: 3, 2002: 2, 1990: 0}[latest and latest.year], (
        "the files give other templates"
    )


def test_what_became_of_each_hit_is_the_same(folder: Path, store: Path) -> None:
    """Catches hits rejected for another reason: dates of caches, renamed chains, withdrawn entries, missing structures."""
    from_files = TemplateSource.open(folder / "templates", None, folder / "obsolete.dat")
    built = FeatureStore(str(store))
    from_store = built.template_source()
    assert from_store is not None
    lines = []
    for source, templates in ((files_of(folder), from_files), (built, from_store)):
        parsed = source.parsed("1abc_A", with_hits=True)
        (found,) = find_templates(templates, parsed).values()
        lines.append(found.log_line)
    assert lines[0] == lines[1]
    assert lines[0].startswith("1abc_A: 4 templates of 6 hits; ")
    assert "no structure (0abc_A)" in lines[0]


def test_without_templates(folder: Path, tmp_path: Path) -> None:
    """Catches a store without templates that cannot be opened, or that reads searches which nobody asked for."""
    (broken := tmp_path / "alignments").mkdir()
    shutil.copytree(folder / "alignments", broken, dirs_exist_ok=True)
    (broken / "1abc_A" / "hmm_output.sto").write_text("no search result")
    shutil.copytree(folder / "mmcif_files", tmp_path / "mmcif_files")
    build(config(tmp_path, tmp_path / "store"))
    built = FeatureStore(str(tmp_path / "store"))
    assert built.keys() == list(LETTERS)
    assert built.structures is None
    assert built.template_source() is None


def test_it_is_what_training_needs(store: Path) -> None:
    """Catches a store that cannot stand in for files, and one that is sent to workers with its content."""
    built = FeatureStore(str(store))
    assert isinstance(built, RecordSource)
    assert isinstance(built.structures, TemplateStructures)
    assert len(pickle.dumps(built)) < 300
    same(pickle.loads(pickle.dumps(built)).parsed("1abc_A", True), built.parsed("1abc_A", True))
    templates = pickle.dumps(built.template_source())
    assert len(templates) < 1000
    assert pickle.loads(templates).structures.structure("8abc").chains.keys() == {"B"}
    assert ("1abc_A" in built, "1abc_B" in built, len(built)) == (True, False, 3)


@pytest.mark.parametrize("scheme", ["memory", "file", "path"])
def test_any_address(store: Path, scheme: str) -> None:
    """Catches a store that can be read from a local disk only."""
    address = {"path": str(store), "file": f"file://{store}", "memory": "memory://bucket/store"}[scheme]
    if scheme == "memory":
        fsspec.filesystem("memory").put(str(store), "/bucket/store", recursive=True)
    same(FeatureStore(address).parsed("2abc_A", True), FeatureStore(str(store)).parsed("2abc_A", True))


# Damage ------------------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def made(store: Path, array: np.ndarray) -> None:
    """Put another index into the store, whose checksum is right."""
    path = store / "chains" / "index.npy"
    np.save(path, array, allow_pickle=True)
    change(store, tables={"chains": digest_of(path.read_bytes())})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda store: flip(store / "chains" / "00000.tar", 600), r"00000\.tar: the record of '1abc_A' is damaged"),
        (lambda store: (store / "chains" / "00000.tar").write_bytes(b"x" * 700), "the record of '1abc_A' is damaged"),
        (lambda store: (store / "chains" / "00000.tar").unlink(), r"00000\.tar: cannot be read"),
        (lambda store: flip(store / "chains" / "index.npy", -1), "the index is damaged"),
        (lambda store: (store / "chains" / "index.npy").unlink(), r"index\.npy: cannot be read"),
        (lambda store: made(store, np.array([{}])), r"index\.npy: not a readable NumPy file"),
        (lambda store: made(store, np.zeros(3)), r"index\.npy: not the index of a feature store"),
        (lambda store: (store / "store.json").unlink(), "no feature store there"),
        (lambda store: (store / "store.json").write_text("[1]"), "'format_version' is missing"),
        (
            lambda store: change(store, format_version=3),
            "has format version 3, this evodsp reads 2; use a newer evodsp",
        ),
        (lambda store: change(store, format_version=1), "reads 2; build the store again with 'evodsp data build'"),
        (lambda store: change(store, tables={}), "'chains' is missing"),
    ],
)
def test_a_damaged_store_is_one_line(store: Path, tmp_path: Path, spoil, message: str) -> None:
    """Catches a damaged record that becomes a sample, a pickle that is run, and a traceback."""
    copy = shutil.copytree(store, tmp_path / "store")
    spoil(copy)
    with pytest.raises(UserError, match=message) as caught:
        FeatureStore(str(copy)).parsed("1abc_A", True)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def change(store: Path, **entries: object) -> None:
    content = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**content, **entries}))


@pytest.mark.parametrize("address", ["nowhere", "unknown://x", "file:///nowhere"])
def test_an_address_without_a_store_is_one_line(address: str) -> None:
    """Catches a traceback of fsspec for a wrong path or an unknown protocol."""
    with pytest.raises(UserError, match=r"no feature store there|not the description") as caught:
        FeatureStore(address)
    assert "\n" not in str(caught.value)


# A feature store of complexes: records restore every bit, samples equal those from files, and other stores are refused.


OF_COMPLEXES = FeatureConfig(crop_size=40, msa_clusters=4, extra_msa=4, max_templates=2, recycles=1)

LATEST = date(2002, 1, 1)


@pytest.fixture
def files(files: ComplexFiles, complex_folder: Path) -> ComplexFiles:
    """The structure 2abc, too, whose chains are templates of A and C."""
    shutil.copy(complex_folder / "2abc.cif", files.structure_dir)
    for chain in "AC":
        letters = files.assembly_of("1abc").chains["ABC".index(chain)].sequence
        row = f"2abc_{chain}/1-{len(letters) - 7}  {'-' * 7}{letters[7:]}"
        (files.alignment_dir / f"1abc_{chain}" / "hmm_output.sto").write_text(f"# STOCKHOLM 1.0\n{row}\n//\n")
    dates = {entry: {"release_date": "2001-01-01"} for entry in ("1abc", "2abc")}
    (files.structure_dir / "mmcif_cache.json").write_text(json.dumps(dates))
    return files


def settings(files: ComplexFiles, output: Path, **changes: object) -> BuildConfig:
    given: dict = {"workers": 1, "complexes": True, **changes}
    return BuildConfig(files.alignment_dir, files.structure_dir, output, **given)


def built(files: ComplexFiles, output: Path, **changes: object) -> str:
    build(settings(files, output, **changes))
    return str(output)


def test_a_record_of_a_complex_restores_every_bit(files: ComplexFiles) -> None:
    """Catches coordinates of another copy, a sequence with another's MSA, pairing rows or hits that are lost or exchanged."""
    parsed = files.parsed("1abc", with_hits=True)
    data = encode_record(parsed)
    found = decode_record(data, with_hits=True)
    assert encode_record(found) == data
    assert (found.assembly.pdb_id, found.assembly.names) == ("1abc", ("A", "B", "C"))
    for one, other in zip(found.assembly.chains, parsed.assembly.chains, strict=True):
        same(one, replace(other, notes=(), breaks=None))
    for one, other in zip(found.chains, parsed.chains, strict=True):
        same(one, other)
        assert one.pairing is not None
    assert found.chains[0].msa is found.chains[1].msa, "copies have the MSA once"
    assert {letters: [hit.name for hit in hits] for letters, hits in found.hits.items()} == {
        letters: [hit.name for hit in hits] for letters, hits in parsed.hits.items()
    }
    assert sum(len(hits) for hits in found.hits.values()) == 2
    for letters, hits in parsed.hits.items():
        for one, other in zip(found.hits[letters], hits, strict=True):
            same(one, other)
    assert decode_record(data, with_hits=False).hits == {}


def test_samples_are_those_of_the_files(files: ComplexFiles, tmp_path: Path) -> None:
    """Catches samples that depend on where a complex was read, and template structures that the store was built without."""
    folder = files.structure_dir
    store = FeatureStore(built(files, tmp_path / "store", template_structure_dir=folder), COMPLEXES)
    assert isinstance(store, Store)
    assert store.keys() == files.keys() == ["1abc"]
    assert store.facts("1abc") == files.facts("1abc")
    of_files, some = TemplateSource.open(folder, LATEST), False
    for training in (True, False):
        one = SampleDataset(files, ["1abc"] * 4, OF_COMPLEXES, seed=3, training=training, templates=of_files)
        other = SampleDataset(
            store, ["1abc"] * 4, OF_COMPLEXES, seed=3, training=training, templates=store.template_source(LATEST)
        )
        other = pickle.loads(pickle.dumps(other))  # as a worker process gets it
        for index in range(4):
            first, second = one[index], other[index]
            assert first.keys() == second.keys()
            some |= bool(first["template_mask"].any())
            for name, values in first.items():
                assert torch.equal(values, second[name]), name
    assert some, "no sample has a template"


def test_chains_without_rows_for_pairing_are_named(files: ComplexFiles, tmp_path: Path) -> None:
    """Catches a store that hides what is said where files are read: that the query alone is paired."""
    (files.alignment_dir / "1abc_C" / "uniprot_hits.a3m").unlink()
    said: list[str] = []
    store = FeatureStore(built(files, tmp_path / "store"), COMPLEXES, warn=lambda place, _: said.append(place))
    assert store.parsed("1abc").chains[2].pairing is None
    assert [place.endswith("1abc chain C") for place in said] == [True]


def test_a_store_is_of_one_assembly_and_one_pairing_rule(files: ComplexFiles, tmp_path: Path) -> None:
    """Catches a store made by another rule than the run's, of another assembly, and ignored settings."""
    address = built(files, tmp_path / "store", pairing="entry", assembly=None)
    store = FeatureStore(address, COMPLEXES)
    by_entry = ComplexFiles(files.alignment_dir, files.structure_dir, None, BY_ENTRY)
    for one, other in zip(store.parsed("1abc").chains, by_entry.parsed("1abc").chains, strict=True):
        same(one, other)
    asked = DataConfig(store=address, train_chains=["1abc"], pairing="entry", assembly=None)
    found = find_chains(asked, arrangement="multimer")
    assert (found.train, found.store.keys()) == (["1abc"], ["1abc"])
    for changes, words in (
        ({"pairing": "species"}, ("--pairing entry", "data.pairing is species", "set it to entry")),
        ({"assembly": "1"}, ("--assembly null", "data.assembly is 1", "set it to null")),
    ):
        with pytest.raises(UserError) as error:
            find_chains(replace(asked, **changes), arrangement="multimer")
        assert all(word in str(error.value) for word in words)


def test_stores_of_chains_and_of_complexes_are_told_apart(files: ComplexFiles, tmp_path: Path) -> None:
    """Catches chains that are taken for complexes, and a message that asks to copy a store that is whole."""
    complexes, chains = (
        built(files, tmp_path / name, complexes=name == "of_complexes") for name in ("of_complexes", "of_chains")
    )
    with pytest.raises(
        UserError, match=r"a feature store of complexes, but samples are made of chains here.*without --complexes"
    ):
        FeatureStore(complexes)
    with pytest.raises(
        UserError, match=r"a feature store of chains, but samples are made of complexes.*with --complexes true"
    ):
        FeatureStore(chains, COMPLEXES)
    description = Path(complexes, "store.json")
    for pairing in ("genus", 3):
        content = json.loads(description.read_text())
        content["plan"]["pairing"] = pairing
        description.write_text(json.dumps(content))
        with pytest.raises(FileFormatError, match="pair"):
            FeatureStore(complexes, COMPLEXES)


def test_broken_complexes_are_left_out_and_a_build_is_continued(files: ComplexFiles, tmp_path: Path) -> None:
    """Catches an entry that ends a build, one that is lost without a word, and a second build that differs by a byte."""
    own = files.alignment_dir / "3abc_A"
    own.mkdir()
    (own / "hits.a3m").write_text(">3abc_A\nACDE\n")
    write_shortened(files.structure_dir, "3abc", 2)
    one, other = (Path(built(files, tmp_path / name)) for name in ("one", "other"))
    failed = [json.loads(line) for line in (one / "failed.jsonl").read_text().splitlines()]
    assert [(entry["kind"], entry["name"]) for entry in failed] == [("complex", "3abc")]
    assert "no alignments of 3abc_C" in failed[0]["reason"]
    assert content(one) == content(other)
    build(settings(files, one))  # is complete: nothing to do
    with pytest.raises(UserError, match="pairing species, not entry"):
        build(settings(files, one, pairing="entry"))
    with pytest.raises(UserError, match=r"no complex '2abc' in the feature store.*Did you mean '1abc'"):
        FeatureStore(str(one), COMPLEXES).parsed("2abc")


def test_a_damaged_record_is_one_line(files: ComplexFiles) -> None:
    """Catches records that end in a traceback: of chains, cut off, or with a number where a name belongs."""
    data = encode_record(files.parsed("1abc"))
    arrays, header = unpacked(data)
    del arrays["header"]
    assert packed(arrays, header) == data
    with pytest.raises(ValueError, match="not a record of a feature store"):
        decode_record(data[: len(data) // 2], with_hits=False)
    for change in ({"names": 3}, {"names": ["A", "A", "C"]}, {"msas": {}}, {"msas": 3}, {"chains": [{}]}):
        with pytest.raises(ValueError, match="not a record of chains with their MSAs"):
            decode_record(packed(arrays, {**header, **change}), with_hits=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"complexes": False, "assembly": "2"}, ("--assembly is 2", "--complexes true")),
        ({"complexes": False, "pairing": "entry"}, ("--pairing is entry", "--complexes true")),
    ],
)
def test_settings_that_would_be_ignored_are_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    """Catches a builder that takes an option and does nothing with it."""
    given: dict[str, Any] = {"complexes": True, **changes}
    with pytest.raises(UserError) as error:
        BuildConfig(Path("a"), Path("b"), Path("c"), **given)
    assert all(word in str(error.value) for word in words)
