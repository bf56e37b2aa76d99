"""A feature store of complexes: records restore every bit, samples equal those from files, and other stores are refused."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.config import FeatureConfig
from evodsp.data.build import build
from evodsp.data.complexes.pairing import BY_ENTRY
from evodsp.data.config import BuildConfig
from evodsp.data.records import COMPLEXES
from evodsp.data.samples.dataset import SampleDataset
from evodsp.data.sources.chain_files import Store
from evodsp.data.sources.feature_store import FeatureStore, decode_record, encode_record, packed, unpacked
from evodsp.data.sources.opening import ComplexFiles
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import FileFormatError, UserError
from evodsp.training.chains import find_chains
from evodsp.training.config import DataConfig
from tests.builders.builds import content
from tests.builders.complex_files import write_complex, write_shortened
from tests.builders.records import same

SAMPLES = FeatureConfig(crop_size=40, msa_clusters=4, extra_msa=4, max_templates=2, recycles=1)

LATEST = date(2002, 1, 1)


@pytest.fixture
def files(tmp_path: Path) -> ComplexFiles:
    """The entry 1abc of the chains A and B, which have one sequence, and C; and 2abc, whose chains are templates of A and C."""
    files = ComplexFiles(*write_complex(tmp_path))
    write_shortened(files.structure_dir, "2abc", 6)
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


def test_a_record_restores_every_bit(files: ComplexFiles) -> None:
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
        one = SampleDataset(files, ["1abc"] * 4, SAMPLES, seed=3, training=training, templates=of_files)
        other = SampleDataset(
            store, ["1abc"] * 4, SAMPLES, seed=3, training=training, templates=store.template_source(LATEST)
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
