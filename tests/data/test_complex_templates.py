"""Templates of complexes: those of each chain, side by side, whole and in crops."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch

from evodsp.config import FeatureConfig
from evodsp.data.complexes.merging import find_templates, side_by_side
from evodsp.data.records import Entity
from evodsp.data.samples.dataset import SampleDataset, load_record
from evodsp.data.similarity.sequences import sequences
from evodsp.data.sources.opening import ComplexFiles
from evodsp.data.sources.structures import KeptStructures, StructureFolder
from evodsp.data.templates.features import TemplateFeatures
from evodsp.data.templates.source import TemplateChains, TemplateSource, listed_chains
from evodsp.errors import FileFormatError, UserError
from evodsp.geometry.residues import encode_sequence
from tests.builders.templates import random_templates

CONFIG = FeatureConfig(crop_size=40, msa_clusters=6, extra_msa=4, max_templates=4, recycles=1, uniform_recycling=False)
WHOLE = replace(CONFIG, crop_size=None)


@pytest.fixture
def files(files: ComplexFiles, complex_folder: Path) -> ComplexFiles:
    """The entries 2abc and 3abc, too: the same structure without the first residues of each chain. (A chain with the whole
    sequence would be no template.)"""
    for entry in ("2abc", "3abc"):
        shutil.copy(complex_folder / f"{entry}.cif", files.structure_dir)
    return files


def of_chains(files: ComplexFiles, *keys: str, max_identity: float = 1.0) -> TemplateSource:
    """The source of templates that are these chains, or all chains of these entries."""
    structures = KeptStructures(files.structure_dir)
    known = listed_chains(structures, keys)
    letters = sequences(structures, known, known, None, workers=1)
    return TemplateSource(structures, chains=TemplateChains(letters, max_identity))


def write_hits(files: ComplexFiles, chain: str, *keys: str) -> Path:
    """A template search that found these chains, each with the chain's residues from the eighth one on."""
    letters = files.parsed("1abc").assembly.chains["ABC".index(chain)].sequence
    rows = [f"{key}/1-{len(letters) - 7}  {'-' * 7}{letters[7:]}" for key in keys]
    path = files.alignment_dir / f"1abc_{chain}" / "hmm_output.sto"
    path.write_text("\n".join(["# STOCKHOLM 1.0", *rows, "//", ""]))
    return path


def test_chains_stand_side_by_side_and_lack_what_they_lack() -> None:
    """Catches chains in the order of the list, templates that a chain with fewer takes from another, gaps where nothing is, and
    scores of one chain that stand for all."""
    two, none, one = random_templates(2, 4), TemplateFeatures.none(3), random_templates(1, 2)
    entities = Entity("AAAA", (0, 2)), Entity("CCC", (3,)), Entity("DD", (1,))
    joined = side_by_side(entities, {"AAAA": two, "CCC": none, "DD": one})
    assert joined.names == ("0abc_A:0abc_A::0abc_A", "1abc_A:1abc_A::")
    for name in ("aatype", "positions", "mask"):
        values, of_two, of_one = (getattr(own, name) for own in (joined, two, one))
        np.testing.assert_array_equal(values[:, :4], of_two)
        np.testing.assert_array_equal(values[:, 4:8], of_two)
        assert not values[:, 8:11].any()
        np.testing.assert_array_equal(values[:1, 11:], of_one)
        assert not values[1:, 11:].any()
    assert not joined.sum_probs.any()
    assert len(side_by_side(entities[1:2], {"CCC": none})) == 0


def test_each_chain_has_its_own_templates(files: ComplexFiles) -> None:
    """Catches templates of another chain, of the complex's own entry, of one copy alone, and a crop of the templates that is
    not that of the residues."""
    chains = files.parsed("1abc").assembly.chains
    source = of_chains(files, "1abc", "2abc", "3abc_C")
    found = {letters: own.features.names for letters, own in load_record(files, "1abc", source).templates.items()}
    assert found == {chains[0].sequence: ("2abc_A",), chains[2].sequence: ("2abc_C", "3abc_C", "2abc_A")}
    for training, config in ((False, WHOLE), (True, CONFIG)):
        dataset, shown = (
            SampleDataset(files, ["1abc"], config, 0, training, templates=source),
            set(),
        )
        for index in range(6 if training else 1):
            sample = dataset[index]
            asym, residue = (sample[name][0] for name in ("asym_id", "residue_index"))
            assert sample["template_aatype"].shape == (1, 4, len(asym))
            positions, types = (sample[f"template_{name}"][0] for name in ("all_atom_positions", "aatype"))
            for number, chain in ((1, chains[0]), (2, chains[0]), (3, chains[2])):
                columns = torch.nonzero((asym == number) & (residue >= 6))[:, 0]  # without those that 2abc lacks
                at = residue[columns].numpy()
                same = positions[:, columns] == torch.from_numpy(chain.positions[at])
                slots = same.flatten(1).all(1).tolist()
                if training:
                    shown.add((number, len(columns) > 0 and any(slots)))
                else:
                    assert slots == [True, False, False, False] if number < 3 else slots[0]
                    assert types[0, columns].tolist() == encode_sequence(chain.sequence)[at].tolist()
        assert not training or {(1, True), (3, True)} <= shown, (
            "no crop has the template that shows which residues it covers"
        )


def test_copies_have_the_same_random_templates(files: ComplexFiles) -> None:
    """Catches templates that are drawn for each copy, for all sequences alike, or not at all in training."""
    source = of_chains(files, "2abc", "3abc")
    dataset = SampleDataset(files, ["1abc"], replace(WHOLE, max_templates=2), 0, True, templates=source)
    numbers = set()
    for index in range(12):
        sample = dataset[index]
        seen = sample["template_all_atom_masks"][0].amax(-1)  # slots, residues
        asym, place = sample["asym_id"][0], sample["residue_index"][0]
        of = {chain: sample["template_all_atom_positions"][0][:, asym == chain] for chain in (1, 2)}
        assert torch.equal(place[asym == 1], place[asym == 2])
        assert torch.equal(of[1], of[2])
        numbers.add(tuple(int((seen[:, asym == chain].amax(1) > 0).sum()) for chain in (1, 3)))
    assert len({first for first, _ in numbers}) > 1
    # Drawn alike, one would have many where the other has many.
    assert any((first, second) in numbers for first, second in ((0, 2), (2, 0), (2, 1)))
    again = SampleDataset(files, ["1abc"], replace(WHOLE, max_templates=2), 0, True, templates=source)
    assert torch.equal(again[5]["template_all_atom_positions"], dataset[5]["template_all_atom_positions"])


def test_one_chain_with_templates_and_one_without(files: ComplexFiles) -> None:
    """Catches a chain without a search that ends the run or moves the others' templates, and hits that lack their structure."""
    write_hits(files, "A", "9abc_A", "1abc_B", "2abc_A")
    record = load_record(files, "1abc", TemplateSource.open(files.structure_dir))
    lines = [found.log_line for found in record.templates.values()]
    assert lines[0].startswith("1abc_A: 0 templates of 3 hits; the query's release date is unknown")
    assert lines[1] == "1abc_C: 0 templates of 0 hits"
    (files.structure_dir / "mmcif_cache.json").write_text(
        json.dumps({entry: {"release_date": "2001-01-01"} for entry in ("1abc", "2abc")})
    )
    dated = TemplateSource.open(files.structure_dir, max_date=date(2002, 1, 1))
    found = find_templates(dated, files.parsed("1abc", with_hits=True))
    assert [own.features.names for own in found.values()] == [("2abc_A",), ()]
    line = next(iter(found.values())).log_line
    assert "1 hit: no structure (9abc_A)" in line
    assert "1 hit: the query's own entry (1abc_B)" in line
    sample = SampleDataset(files, ["1abc"], WHOLE, 0, False, templates=dated)[0]
    is_third = sample["asym_id"][0] == 3
    for name in ("template_aatype", "template_all_atom_masks", "template_all_atom_positions"):
        assert not sample[name][0][:, is_third].any()
        assert sample[name][0][0, ~is_third].any()


def test_no_template_is_newer_than_the_complex(files: ComplexFiles) -> None:
    """Catches a complex without its release date among its templates' limits, which is trained on newer structures."""
    write_hits(files, "A", "3abc_A", "2abc_A")
    released = {"1abc": "2003-01-01", "2abc": "2001-01-01", "3abc": "2005-01-01"}
    content = {entry: {"release_date": day} for entry, day in released.items()}
    (files.structure_dir / "mmcif_cache.json").write_text(json.dumps(content))
    parsed = files.parsed("1abc", with_hits=True)
    chains = tuple(replace(chain, release_date=date(2003, 1, 1)) for chain in parsed.assembly.chains)
    parsed = replace(parsed, assembly=replace(parsed.assembly, chains=chains))
    for latest in (None, date(2010, 1, 1)):
        found = find_templates(TemplateSource.open(files.structure_dir, max_date=latest), parsed)
        assert [own.features.names for own in found.values()] == [("2abc_A",), ()]


def test_a_truncated_search_is_named(files: ComplexFiles) -> None:
    """Catches a search result of a complex that is read as one with fewer hits, and a search of another chain."""
    path = write_hits(files, "C", "2abc_C", "3abc_C")
    path.write_text(path.read_text().removesuffix("//\n"))
    source = TemplateSource.open(files.structure_dir, max_date=date(2002, 1, 1))
    with pytest.raises(FileFormatError, match=rf"{path}"):
        load_record(files, "1abc", source)
    without = SampleDataset(files, ["1abc"], replace(WHOLE, max_templates=0), 0, False, templates=source)[0]
    assert "template_aatype" not in without, "no search is read for samples without templates"
    write_hits(files, "A", "2abc_A").rename(path)
    with pytest.raises(UserError, match="1abc_C"):
        load_record(files, "1abc", source)


def test_copies_of_a_listed_chain_are_listed(files: ComplexFiles) -> None:
    """Catches a training complex that may copy its double because another copy of its chain is the one in the list."""
    parsed = files.parsed("1abc")
    letters = parsed.assembly.chains[0].sequence
    for listed, expected in ((["1abc_A"], ()), (["1abc_B"], ()), ([], ("2abc_A",))):
        found = find_templates(of_chains(files, *listed, "2abc", max_identity=0.9), parsed)
        assert found[letters].features.names == expected


def test_an_entry_stands_for_its_chains(files: ComplexFiles) -> None:
    """Catches entries whose chains are not listed, names of single chains that change, and a broken file that ends a run."""
    (files.structure_dir / "4abc.cif").write_text("data_4abc\n_atom_site.id 1\n")
    found = listed_chains(StructureFolder(files.structure_dir), ["2abc", "3abc_C", "4abc", "5abc", "2abc_B"])
    chains = files.parsed("1abc").assembly.chains
    whole = {f"2abc_{chain.chain_id}": chain.sequence[6:] for chain in chains}
    assert found == whole | {"2abc_B": ""} | dict.fromkeys(("3abc_C", "4abc", "5abc"), "")
    assert list(found) == [*whole, "3abc_C", "4abc", "5abc"]


def test_templates_count_in_the_cache(files: ComplexFiles) -> None:
    """Catches a cache that grows by the templates without knowing it."""
    with_, without = (load_record(files, "1abc", source) for source in (of_chains(files, "2abc"), None))
    assert with_.nbytes - without.nbytes == sum(own.features.nbytes for own in with_.templates.values()) > 0
