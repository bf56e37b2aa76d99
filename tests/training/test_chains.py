"""Which chains a run takes: missing ones are left out and listed; an index, a store and a cache say the same as the folders."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig, FilterConfig, LossConfig
from evodsp.data.build import build
from evodsp.data.index.data_index import DataIndex
from evodsp.data.samples.dataset import SampleDataset
from evodsp.data.samples.selection import DISTILLED, CountedStructures, DistillationSet, Presence, chain_list
from evodsp.data.similarity import sequences
from evodsp.data.similarity.nearest import resembling
from evodsp.data.similarity.sequences import identity
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.sources.opening import ComplexFiles
from evodsp.errors import UserError
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.parallel.group import Group
from evodsp.report.runs import read_curve
from evodsp.training import chains as chains_module
from evodsp.training.chains import ChainDataModule, find_chains, unapplied_filters
from evodsp.training.config import DataConfig, DistillationConfig
from scripts.examples.synthetic.mmcif_writer import write_mmcif
from tests.builders.builds import config as build_config
from tests.builders.bundled import dimers
from tests.builders.chains import MemoryStore, make_chain
from tests.builders.complex_files import write_complex
from tests.builders.labelled_batch import WEIGHTS, batch_of
from tests.builders.small_model import config as small_config
from tests.builders.small_model import features
from tests.builders.training_chains import BOTH, SEQUENCES, TINY, write_chain
from tests.ranks import RankPool

KEY, OTHER = SEQUENCES
DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two chains, alignments of a third one without a structure, and an index."""
    for key, letters in SEQUENCES.items():
        write_chain(tmp_path, key, letters)
    (tmp_path / "alignments" / "3abc_C").mkdir()
    (tmp_path / "alignments" / "3abc_C" / "hits.a3m").write_text(">q\nACD\n")
    roots = ["--alignment_dir", str(tmp_path / "alignments"), "--structure_dir", str(tmp_path / "mmcif_files")]
    assert main(["data", "index", *roots, "--output", str(tmp_path / "index"), "--workers=0"]) == 0
    return tmp_path


def config(folder: Path, indexed: bool, **settings: object) -> DataConfig:
    roots = {"alignment_dir": str(folder / "alignments"), "structure_dir": str(folder / "mmcif_files")}
    index = str(folder / "index") if indexed else None
    return DataConfig(**roots, index=index, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_structures_in_the_folders_of_their_chains(folder: Path, indexed: bool, together: bool) -> None:
    """Catches chains of OpenProteinSet's nested layout that training, the index or the doctor calls missing."""
    structures = folder / ("alignments" if together else "mmcif_files")
    for key, kind in ((KEY, "cif"), (OTHER, "pdb")):
        place = structures / key / kind
        place.mkdir(parents=True)
        (folder / "mmcif_files" / f"{key.split('_')[0]}.cif").rename(place / "prediction.cif")
    roots = ["--alignment_dir", str(folder / "alignments"), "--structure_dir", str(structures)]
    assert main(["data", "index", *roots, "--output", str(folder / "index"), "--workers=0", "--overwrite"]) == 0
    index = DataIndex(folder / "index")
    assert index.structure(index.row(OTHER)) == f"{OTHER}/pdb/prediction.cif"
    assert "".join(index.sequences_of(index.row(OTHER))) == SEQUENCES[OTHER]
    found = find_chains(replace(config(folder, indexed), structure_dir=str(structures)))
    assert (found.train, found.missing) == ([KEY, OTHER], {"3abc_C": "structure"})
    assert isinstance(found.store, ChainFiles)
    assert found.store.parsed(OTHER, with_hits=False).assembly.chains[0].sequence == SEQUENCES[OTHER]
    options = [*roots, *(["--index", str(folder / "index")] if indexed else []), "--output", str(folder / "doctor")]
    assert main(["data", "doctor", *options, "--workers=0"]) == 0
    report = json.loads((folder / "doctor" / "doctor.json").read_text())
    assert report["chains"] == [{"chain": "3abc_C", "state": "missing", "reason": "no structure"}]
    assert (report["counts"]["read"], report["stale"], report["structures_without_alignments"]) == (2, [], [])


@pytest.mark.parametrize("indexed", [False, True])
def test_missing_training_chains_are_left_out(folder: Path, indexed: bool) -> None:
    """Catches a start that ends at the first of a thousand missing chains, and a run on nothing."""
    found = find_chains(config(folder, indexed))
    assert (found.train, found.missing) == ([KEY, OTHER], {"3abc_C": "structure"})
    found = find_chains(config(folder, indexed, train_chains=["9abc_Z", OTHER, "3abc_C", "8abc_Z"]))
    assert found.train == [OTHER]
    assert found.missing == {"9abc_Z": "alignments", "3abc_C": "structure", "8abc_Z": "alignments"}
    (note,) = found.notes(Path("run/missing_chains.tsv"))
    assert note == (
        "3 of 4 training chains are left out: 2 without alignments, 1 without structure; run/missing_chains.tsv lists them"
    )
    with pytest.raises(UserError, match=r"train_chains: no structure of chain '3abc_C'"):
        find_chains(config(folder, indexed, train_chains=["3abc_C", "9abc_Z"]))
    with pytest.raises(UserError, match=r"validation_chains: no alignments of chain '1abd_A'.*Did you mean '1abc_A'"):
        find_chains(config(folder, indexed, validation_chains=[KEY, "1abd_A"]))
    with pytest.raises(UserError, match=r"test_chains: no structure of chain '3abc_C'.*Did you mean '2abc'"):
        find_chains(config(folder, indexed, test_chains=["3abc_C"]))


def looked_up(group: Any, folder: Path, chains: list[str] | None) -> tuple[list[str], int] | str:
    """The chains that this rank takes, and how often it looked some up; or the mistake."""
    with mock.patch.object(chains_module, "Presence", side_effect=Presence) as presence:
        try:
            found = find_chains(config(folder, False, train_chains=chains), group=Group(group))
        except UserError as error:
            return str(error)
    return found.train, presence.call_count


def test_one_rank_looks_the_chains_up(pool: RankPool, folder: Path) -> None:
    """Catches a start in which all ranks list and read the same files at once, and ranks that do not hear of a mistake."""
    assert pool.run(2, looked_up, folder, None) == [([KEY, OTHER], 1), ([KEY, OTHER], 0)]
    first, second = pool.run(2, looked_up, folder, ["9abc_Z"])
    assert first == second
    assert "no alignments of chain '9abc_Z'" in first


def test_an_old_index_is_noticed(folder: Path) -> None:
    """Catches chains that were added since and are never trained on, without a word."""
    assert find_chains(config(folder, True, train_chains=[KEY])).notes(Path("x")) == []
    os.utime(folder / "alignments", ns=(1, 1))
    (note,) = find_chains(config(folder, True, train_chains=[KEY])).notes(Path("x"))
    assert note.startswith(
        f"{folder / 'index'} is older than alignment_dir {folder / 'alignments'}; make it again: evodsp data"
    )
    assert note.endswith("--overwrite")


def test_a_run_with_an_index_lists_what_it_leaves_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches data.index ignored by `fit`, and a list of missing chains that is not written, or an earlier run's."""
    roots = (
        f"data:\n  alignment_dir: {folder}/alignments\n  structure_dir: {folder}/mmcif_files\n  index: {folder}/index\n"
    )
    (folder / "tiny.yaml").write_text(TINY.replace("data:\n", roots))
    fit = ["fit", "--config", str(folder / "tiny.yaml"), "--output", str(folder / "run"), "--trainer.max_steps=1"]
    fit.append("--trainer.limit_val_batches=0")
    assert main(fit) == 0
    assert (folder / "run" / "missing_chains.tsv").read_text() == "3abc_C\tno structure\n"
    said = capsys.readouterr().err
    assert "data.train_chains is null: 1 of 3 are validation or test chains and left out" in said
    assert "evodsp: warning: 1 of 2 training chains are left out: 1 without structure" in said
    assert main([*fit, f"--data.train_chains=[{OTHER}]", "--overwrite"]) == 0
    assert not (folder / "run" / "missing_chains.tsv").exists()
    assert "warning" not in capsys.readouterr().err
    (folder / "index" / "lengths.npy").unlink()
    assert main([*fit, "--overwrite"]) == 2
    assert "missing, truncated" in capsys.readouterr().err


def test_withdrawn_entries_of_the_index(folder: Path) -> None:
    """Catches templates of withdrawn entries that are lost although the index knows their successors."""
    roots = ["--alignment_dir", str(folder / "alignments"), "--structure_dir", str(folder / "mmcif_files")]
    (folder / "obsolete.dat").write_text("OBSLTE    31-JUL-94 9ABC     1ABC\n")
    options = ["--obsolete", str(folder / "obsolete.dat"), "--overwrite", "--workers=0"]
    assert main(["data", "index", *roots, "--output", str(folder / "index"), *options]) == 0
    features = FeatureConfig(msa_clusters=4, max_templates=1)
    settings = {"train": features, "validation": features, "template_structure_dir": str(folder / "mmcif_files")}
    for indexed, expected in ((True, {"9abc": "1abc"}), (False, {})):
        source = find_chains(config(folder, indexed, **settings)).templates
        assert source is not None
        assert source.obsolete == expected


def test_withdrawn_entries_of_an_index_of_complexes(tmp_path: Path) -> None:
    """Catches --obsolete that is taken for complexes and ignored, and an index of predicted complexes that is."""
    alignments, structures = write_complex(tmp_path)
    (tmp_path / "obsolete.dat").write_text("OBSLTE    31-JUL-94 9ABC     1ABC\n")
    roots = {"alignment_dir": str(alignments), "structure_dir": str(structures), "index": str(tmp_path / "index")}
    words = [f"--{name}={value}" for name, value in roots.items() if name != "index"]
    options = ["--complexes=true", "--workers=0", f"--obsolete={tmp_path / 'obsolete.dat'}"]
    assert main(["data", "index", *words, *options, f"--output={roots['index']}"]) == 0
    predicted = DistillationConfig(**roots, chains=["1abc"])
    features = FeatureConfig(msa_clusters=4, max_templates=1)
    data = DataConfig(
        **roots,
        train=features,
        validation=features,
        train_chains=["1abc"],
        template_structure_dir=str(structures),
        max_template_date="2020-01-01",
        distillation=predicted,
    )
    found = find_chains(data, arrangement="multimer")
    assert found.templates is not None
    assert found.templates.obsolete == {"9abc": "1abc"}
    assert found.distillation is not None
    source = found.distillation.source
    assert isinstance(source, ComplexFiles)
    assert source.index is not None
    assert source.index.path == tmp_path / "index"


def test_a_list_of_many_chains_is_read_in_time(tmp_path: Path) -> None:
    """Catches a search for repetitions that is quadratic: 200,000 names would take an hour."""
    names = [f"{number:06d}_A" for number in range(200_000)]
    assert chain_list(names) == names
    with pytest.raises(UserError, match="'000017_A' is listed more than once"):
        chain_list([*names, "000017_A"])
    (tmp_path / "twice.txt").write_text("# mine\n1abc_A\n\n1abc_A # again\n")
    with pytest.raises(UserError, match=r"twice\.txt:4: '1abc_A' is listed more than once"):
        chain_list(str(tmp_path / "twice.txt"))


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfs002_A\r\ns003_A\r\n",
        b"s002_A\rs003_A # comment\r",
        gzip.compress(b"s002_A\n# comment\n\ns003_A", mtime=0),
        "s002_A # Größe\ns003_A".encode(),
    ],
)
def test_a_list_of_chains_is_read_as_all_text_is(content: bytes, tmp_path: Path) -> None:
    """Catches a byte-order mark that becomes a part of the first name, whose chain is then left out."""
    (tmp_path / "chains.txt").write_bytes(content)
    assert chain_list(str(tmp_path / "chains.txt")) == ["s002_A", "s003_A"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("s002_A\r\ns003_A\r\n".encode("utf-16"), "chains.txt:1: the text is UTF-16.*save it as UTF-8"),
        ("s002_A\n".encode("utf-16-be"), "chains.txt:1: not a text file"),
        ("s002_A\nzappé_A\n".encode("latin-1"), "chains.txt:2: not a text file .bytes that are not UTF-8"),
        (b"", "chains.txt: the file is empty"),
        (b"# nothing\n", "chains.txt: no chain names in it"),
    ],
)
def test_a_list_of_chains_that_is_no_text_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    """Catches a traceback of the decoder, and names of letters that look right."""
    (tmp_path / "chains.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        chain_list(str(tmp_path / "chains.txt"))


def test_no_file_of_a_chain_is_touched_before_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a start that asks the file system for every chain, which takes a millisecond each on a network, and not only for
    the few whose resolution is looked at."""
    for number in range(100):
        (folder / "alignments" / f"4abc_{number}").mkdir()
    (folder / "mmcif_files" / "4abc.cif").touch()
    asked: list[Path] = []
    original = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: asked.append(path) or original(path))
    assert len(find_chains(config(folder, False)).train) == 102
    assert len([path for path in asked if path.suffix == ".cif"]) <= chains_module.CHAINS_FOR_RESOLUTION
    index = DataIndex(folder / "index")
    assert len(index) == 3


@pytest.mark.parametrize("source", ["files", "index", "store"])
def test_a_filter_that_is_given_is_applied(source: str, tmp_path: Path) -> None:
    """Catches a cut-off date, or another filter, without a cache: the run trains on everything, and says nothing."""
    folders = {"alignment_dir": str(DATA / "alignments"), "structure_dir": str(DATA / "mmcif_files")}
    given = [f"--{name}={path}" for name, path in folders.items()]
    command = {"index": "index", "store": "build"}.get(source)
    if command is not None:
        assert main(["data", command, *given, f"--output={tmp_path / source}", "--workers=1"]) == 0
        folders[source] = str(tmp_path / source)
    chains = ["s001_A", "s002_A", "s004_A"]

    def left(**filters: object) -> list[str]:
        return find_chains(DataConfig(**folders, train_chains=chains, filters=FilterConfig(**filters))).train  # type: ignore[arg-type]

    assert left() == left(max_release_date="2020-12-31") == chains
    assert left(max_release_date="2020-01-08") == chains[:1]
    for filters, reason in (
        ({"max_release_date": "2018-04-30"}, "released after 2018-04-30"),
        ({"max_resolution": 0.9}, "resolution above 0.9 Å"),
        ({"max_residue_share": 0.1}, "more than 10% of one residue type"),
    ):
        with pytest.raises(UserError, match=rf"data\.filters: 0 of 3 training chains; left out: 3 {reason}"):
            left(**filters)


def test_filters_that_are_given_but_not_applied_are_said() -> None:
    """Catches a filter that a user wrote and that leaves nothing out, without a word, because its value is the default."""
    given = {"data.filters.max_resolution": "a.yaml:3: ", "data.distillation.filters": "--"}
    lines = unapplied_filters(DataConfig(), given)
    assert [line.partition(" are not")[0] for line in lines] == ["a.yaml:3: data.filters", "data.distillation.filters"]
    assert unapplied_filters(DataConfig(), {"data.filtersets": "--"}) == []
    applied = (
        {"chain_data_cache": "x.json"},
        {"sampling": "alphafold2"},
        {"filters": FilterConfig(max_residue_share=0.9)},
    )
    for settings in applied:
        assert unapplied_filters(DataConfig(**settings), {"data.filters.max_resolution": "--"}) == [], settings


LETTERS = "MKTAYIAKQRWLEGSHMDERCNPFVY"
RELATIVES = {
    "1abc_A": LETTERS,
    "2abc_A": f"{LETTERS[:-8]}WWWWWWWW",  # 18 of 26 residues are those of 1abc_A
    "3abc_A": LETTERS[::-1],
    "4abc_A": "ACDEFGHIKL",  # too short to be aligned
    "5abc_A": "ACDEFGHIKL",
}


def relatives(folder: Path, **settings: object) -> DataConfig:
    for key, letters in RELATIVES.items():
        if not (folder / "alignments" / key).is_dir():
            write_chain(folder, key, letters)
    return config(folder, False, **settings)


def test_without_a_list_all_chains_but_the_held_out_ones_are_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches the documentation's own command for own proteins, which scored a chain that it had trained on."""
    (tmp_path / "alignments").mkdir()
    found = find_chains(relatives(tmp_path, validation_chains=["1abc_A"], test_chains=["2abc_A"]))
    assert found.train == ["3abc_A", "4abc_A", "5abc_A"]
    assert "data.train_chains is null: 2 of 5 are validation or test chains and left out" in capsys.readouterr().err
    (tmp_path / "alignments" / "3abc_A").rename(
        tmp_path / "alignments" / "3abc"
    )  # the lists may call 3abc by its chain
    assert find_chains(config(tmp_path, False, validation_chains=["3abc_A", "1abc_A"])).train == [
        "2abc_A",
        "4abc_A",
        "5abc_A",
    ]
    with pytest.raises(UserError, match=r"data\.train_chains is null.* there are no others"):
        find_chains(config(tmp_path, False, validation_chains=["3abc", *(key for key in RELATIVES if key != "3abc_A")]))


def test_what_resembles_a_list_is_not_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches relatives of held-out chains that stay, others that go, copies too short for an alignment, and a chain of which
    nobody knows whether it is one."""
    (tmp_path / "alignments").mkdir()
    (tmp_path / "targets.fasta").write_text(f">t\n{LETTERS}\n")
    for source, share, left in (
        (["1abc_A"], 0.4, ["3abc_A", "4abc_A", "5abc_A"]),
        (["1abc_A"], 0.7, ["2abc_A", "3abc_A", "4abc_A", "5abc_A"]),
        (["4abc_A"], 0.4, ["1abc_A", "2abc_A", "3abc_A"]),
        (str(tmp_path / "targets.fasta"), 0.4, ["3abc_A", "4abc_A", "5abc_A"]),
    ):
        data = relatives(tmp_path, exclude_like=source, exclude_identity=share)
        assert find_chains(data).train == left, source
        said = f"left out: {5 - len(left)} alike those of data.exclude_like (more than {share:.0%} identical)"
        assert said in capsys.readouterr().err
    with mock.patch.object(sequences, "read_sequences", lambda _, key: () if key == "3abc_A" else (RELATIVES[key],)):
        assert find_chains(relatives(tmp_path, exclude_like=["1abc_A"])).train == ["4abc_A", "5abc_A"]
        assert "1 of a sequence that cannot be compared with them" in capsys.readouterr().err
        with pytest.raises(UserError, match=r"exclude_like: the sequence of '3abc_A' cannot be read"):
            find_chains(relatives(tmp_path, exclude_like=["3abc_A"]))
    with pytest.raises(UserError, match=r"data\.exclude_identity is given, but data\.exclude_like is null"):
        relatives(tmp_path, exclude_identity=0.3)


def test_complexes_that_resemble_others() -> None:
    """Catches a complex that goes because of one chain, one that stays because it has more chains, and peptides that decide."""
    one, two = LETTERS, LETTERS[::-1]
    listed = {"held_out": (one, two, "ACD")}
    training = {"same": (two, one), "more": (one, two, two[3:], "GG"), "half": (one, one), "none": ("WWW",)}
    assert resembling(listed, training, 0.4) == {"same": "held_out", "more": "held_out"}
    assert resembling({"peptide": ("ACD",)}, {"a": ("ACD", one), "b": (two,)}, 0.4) == {"a": "peptide"}


@pytest.mark.verify
def test_a_run_on_complexes_holds_out_and_excludes(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches complexes that are trained on although they are scored, or although they resemble those of a list."""
    data = DataConfig(
        alignment_dir=str(dimers() / "alignments"),
        structure_dir=str(dimers() / "mmcif_files"),
        validation_chains=["c001"],
        exclude_like=["c001"],
        exclude_identity=0.35,
    )
    found = find_chains(data, arrangement="multimer")
    said = capsys.readouterr().err
    assert "data.train_chains is null: 1 of 40 are validation or test chains and left out" in said
    assert "38 of 39 training chains; left out: 1 alike those of data.exclude_like (more than 35% identical)" in said
    assert len(found.train) == 38
    nearest, chains = identities("c001", {*found.train})
    assert nearest <= 0.35, chains


def identities(entry: str, others: set[str]) -> tuple[float, str]:
    """The highest, over some complexes, of the lowest identity of the entry's chains with theirs."""
    files = ComplexFiles(dimers() / "alignments", dimers() / "mmcif_files")
    own = [one.sequence for one in files.assembly_of(entry).chains]
    found = [
        (min(max(identity(one.sequence, letters) for one in files.assembly_of(key).chains) for letters in own), key)
        for key in sorted(others)
    ]
    return max(found)


@pytest.fixture(scope="module")
def store(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("built") / "store"
    build(build_config(chains, output))
    return output


def settings(chains: Path, **changes: object) -> DataConfig:
    folders = {"alignment_dir": str(chains / "alignments"), "structure_dir": str(chains / "mmcif_files")}
    given: dict = {
        **folders,
        "samples_per_epoch": 4,
        "train_chains": list(SEQUENCES),
        "validation_chains": list(SEQUENCES),
        **changes,
    }
    return DataConfig(**given)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.verify)])
def test_batches_equal_those_from_files(chains: Path, store: Path, workers: int) -> None:
    """Catches the setting ignored, and a store that worker processes cannot open."""
    nowhere = {"alignment_dir": "nowhere", "structure_dir": "nowhere", "num_workers": workers, "store": str(store)}
    from_store = find_chains(settings(chains, **nowhere))
    assert isinstance(from_store.store, FeatureStore)
    both = [
        ChainDataModule(settings(chains, num_workers=workers), found)
        for found in (find_chains(settings(chains)), from_store)
    ]
    for loaders in zip(*([m.train_dataloader(), m.val_dataloader()] for m in both), strict=True):
        for expected, found in zip(*loaders, strict=True):
            assert expected.keys() == found.keys()
            assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"store": "nowhere"}, "nowhere: no feature store there"),
        (
            {"train_chains": ["1abc_X"]},
            r"data\.train_chains: no chain '1abc_X' in .*; leave it out.*Did you mean '1abc_A'",
        ),
        (
            {"template_structure_dir": "data"},
            r"data\.template_structure_dir is data, but data\.store holds the templates",
        ),
        ({"obsolete": "obsolete.dat"}, r"data\.obsolete is obsolete\.dat, but data\.store holds"),
        (
            {"max_template_date": "2018-04-30"},
            r"data\.max_template_date is 2018-04-30, but .* was built without templates",
        ),
        ({"max_template_date": "tomorrow"}, r"data\.max_template_date is 'tomorrow', but must be a date"),
    ],
)
def test_wrong_settings_are_one_line(chains: Path, store: Path, changes: dict, message: str) -> None:
    """Catches settings that a store makes meaningless and that are ignored without a word."""
    with pytest.raises(UserError, match=message) as caught:
        find_chains(settings(chains, **{"store": str(store), **changes}))
    assert "\n" not in str(caught.value)


CONFIG = FeatureConfig(crop_size=6, msa_clusters=4, extra_msa=3, recycles=0)


@pytest.fixture
def unresolved(tmp_path: Path) -> Path:
    """Two chains, of which the second has no resolution, and a config of `fit` that trains on both."""
    for key, letters in SEQUENCES.items():
        write_chain(tmp_path, key, letters)
    without(tmp_path, OTHER)
    roots = f"data:\n  alignment_dir: {tmp_path}/alignments\n  structure_dir: {tmp_path}/mmcif_files\n{BOTH}"
    (tmp_path / "tiny.yaml").write_text(TINY.replace("data:\n", roots))
    return tmp_path


def without(unresolved: Path, key: str) -> None:
    """Write the structure of a chain again, as a model that states no resolution."""
    chain = ChainFiles(unresolved / "alignments", unresolved / "mmcif_files").chain(key)
    write_mmcif(unresolved / "mmcif_files" / f"{chain.pdb_id}.cif", [dataclasses.replace(chain, resolution=None)])


def test_the_terms_that_ask_for_a_resolution() -> None:
    """Catches a term that counts other structures than `LossConfig.by_resolution` says, which the notes of a run name."""
    torch.manual_seed(0)
    heads = dataclasses.replace(small_config().heads, experimentally_resolved=True, predicted_aligned_error=True)
    model = AlphaFold(dataclasses.replace(small_config(), heads=heads)).double().eval()
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
def test_the_resolutions_of_the_training_chains(unresolved: Path, how: str) -> None:
    """Catches a data set of which nobody knows the resolutions: a long one, with or without an index or cache."""
    roots = {"alignment_dir": str(unresolved / "alignments"), "structure_dir": str(unresolved / "mmcif_files")}
    more: dict[str, str] = {}
    if how == "index":
        options = [f"--{name}={value}" for name, value in roots.items()]
        assert main(["data", "index", *options, "--output", str(unresolved / "index"), "--workers=0"]) == 0
        more = {"index": str(unresolved / "index")}
    if how == "cache":
        facts = {"release_date": "2010-01-01", "seq": "ACDE", "cluster_size": 3}
        cache = {KEY: {**facts, "resolution": 2.0}, OTHER: {**facts, "resolution": 0.0}}
        (unresolved / "cache.json").write_text(json.dumps(cache))
        more = {"chain_data_cache": str(unresolved / "cache.json")}
    if how == "sample":
        (unresolved / "mmcif_files" / "3abc.cif").write_text("broken")
        (unresolved / "alignments" / "3abc_C").mkdir()
    with mock.patch.object(chains_module, "MOST_CHAINS_READ", 64 if how == "read" else 0):
        found = find_chains(DataConfig(**roots, **more))  # type: ignore[arg-type]
    assert found.resolutions.tolist() == [2.0, 0.0]


def test_fit_and_the_doctor_say_that_nothing_is_counted(unresolved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches `train/plddt` of 0 for a whole run without a word, and a setting that does not change it."""
    note = "2 of 2 training chains have no resolution: they do not train plddt, as in AlphaFold2"
    without(unresolved, KEY)
    words = [f"--config={unresolved}/tiny.yaml", "--trainer.max_steps=1", "--trainer.limit_val_batches=0"]
    for name, options in (("none", []), ("assumed", ["--data.assumed_resolution=2"])):
        assert main(["fit", *words, f"--output={unresolved}/{name}", *options]) == 0
        assert (f"evodsp: warning: {note}" in capsys.readouterr().err) == (name == "none")
        assert (float(read_curve(unresolved / name / "curve.csv")[0]["train/plddt"]) > 0) == (name == "assumed")
    examine = ["data", "doctor", f"--config={unresolved}/tiny.yaml", f"--output={unresolved}/doctor", "--workers=0"]
    assert main(examine) == 0
    page, report = ((unresolved / "doctor" / f"doctor.{kind}").read_text() for kind in ("html", "json"))
    assert note in capsys.readouterr().out
    assert note in page
    assert json.loads(report)["not_counted"].startswith(note)
    text = (unresolved / "tiny.yaml").read_text()
    (unresolved / "tiny.yaml").write_text(text.replace("data:\n", "data:\n  assumed_resolution: 2\n"))
    assert main(examine) == 0
    assert "no resolution" not in capsys.readouterr().out
