"""Complexes: from files with several chains and their MSAs to structures, rankings and scores."""

from __future__ import annotations

import json
import re
import shutil
import string
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import gemmi
import numpy as np
import pytest
import torch

from evodsp.data.complexes.merging import merge, side_by_side
from evodsp.data.formats.mmcif import read_structure
from evodsp.data.records import ProteinSequence
from evodsp.data.samples.dataset import collate
from evodsp.data.sources.msa import query_only
from evodsp.data.sources.parsed import ChainMsas
from evodsp.errors import UserError
from evodsp.features.batch import complex_sample
from evodsp.geometry.residues import CA, decode, encode
from evodsp.inference.api import as_given_files
from evodsp.inference.api import predict as api_predict
from evodsp.inference.config import Pairing
from evodsp.inference.interfaces import ComplexScores, score_entries
from evodsp.inference.jobs import NUMERICS
from evodsp.inference.pages.target_page import write_target_page
from evodsp.inference.predict import predict, predict_records
from evodsp.inference.prediction import Prediction
from evodsp.inference.results import PredictionResult, _read_chains, write_results
from evodsp.inference.seeds import structure_of
from evodsp.inference.structure_files import (
    MOST_CHAINS,
    MOST_IN_PDB,
    AlignedError,
    PredictedStructure,
    chain_name,
    structure_text,
)
from evodsp.inference.target_msas import ComplexMsa, find_templates, template_source
from evodsp.inference.targets import Target, find_targets
from evodsp.model.alphafold import AlphaFold
from evodsp.model.heads import (
    ModelOutput,
    StructureOutput,
    compute_complex_confidence,
    compute_contact_weights,
    compute_contacts,
    compute_pae,
)
from evodsp.parallel.config import SequenceConfig
from evodsp.parallel.exchange import LocalExchange
from evodsp.weights.checkpoint import load_model
from tests.builders.prediction import read_json, silent
from tests.builders.training_chains import write_chain
from tests.ranks import RankPool

from .conftest import LETTERS, MULTIMER, OTHER, QUERY, SIZES, TINY, settings, write_alignment
from .test_parallel_predict import predict_on_rank
from .test_target_page import embedded


@pytest.fixture(scope="session")
def trimer(tmp_path_factory: pytest.TempPathFactory, multimer: Path) -> PredictionResult:
    """The finished prediction of a complex, whose files tests must not change."""
    root = tmp_path_factory.mktemp("trimer")
    return predict(settings(root, multimer, f">trimer\n{':'.join(LETTERS)}\n", seeds=2), silent)[0]


def test_scores_are_those_of_the_chains_as_given() -> None:
    """Catches scores, aligned errors or contacts in the order of the model's columns: A, D, B, C."""
    letters = (QUERY, OTHER, OTHER, QUERY)
    number_of = {"A": 1, "D": 2, "B": 3, "C": 4}
    heads = replace(TINY.heads, predicted_aligned_error=True)
    model = MagicMock(spec=AlphaFold, exchange=LocalExchange(), config=replace(MULTIMER, heads=heads))
    residues, torch_draws = sum(map(len, letters)), torch.Generator().manual_seed(0)
    logits = {
        name: 3 * torch.randn(1, residues, residues, bins, generator=torch_draws)
        for name, bins in (("predicted_aligned_error", heads.pae_bins), ("distogram", heads.distogram_bins))
    }
    structure = MagicMock(spec=StructureOutput)
    structure.positions = torch.randn(1, residues, 37, 3, generator=torch_draws)
    structure.mask = torch.ones(1, residues, 37)
    lengths = torch.tensor([len(QUERY), len(QUERY), len(OTHER), len(OTHER)])
    asym = torch.tensor([1, 2, 3, 4]).repeat_interleave(lengths)[None]
    batch = {
        "aatype": torch.arange(residues).int()[None, None] % 20,
        "seq_mask": torch.ones(1, 1, residues),
        "asym_id": asym[None],
    }
    output = ModelOutput({}, structure, {**logits, "plddt": torch.randn(1, residues, 5, generator=torch_draws)})
    named = zip("ABCD", letters, strict=True)
    chains = tuple(Target(ProteinSequence(f"x_{name}", own), None) for name, own in named)
    one = structure_of(Target(ProteinSequence("x", "".join(letters)), None, chains=chains), batch, output, model)

    assert one.lengths == tuple(map(len, letters))
    error = one.aligned_error
    assert error is not None
    assert error.of_chains is not None
    assert one.contacts is not None
    pae, contacts = (
        compute_pae(logits["predicted_aligned_error"]),
        compute_contacts(logits["distogram"], 2.3125, 21.6875),
    )
    columns = {name: asym[0] == number for name, number in number_of.items()}
    for chain in one.chains:
        np.testing.assert_array_equal(one.positions[chain.residues], structure.positions[0, columns[chain.name]])
        for other in one.chains:
            place = np.ix_(columns[chain.name], columns[other.name])
            np.testing.assert_array_equal(error.pae[chain.residues, other.residues], pae[0].numpy()[place])
            np.testing.assert_array_equal(one.contacts[chain.residues, other.residues], contacts[0].numpy()[place])
    weights = compute_contact_weights(logits["distogram"], 2.3125, 21.6875)
    found = compute_complex_confidence(logits["predicted_aligned_error"], weights, torch.ones(1, residues), asym, 4)
    entries = score_entries(error.of_chains, one.interfaces, "ABCD")
    assert entries["iptm"] == pytest.approx(float(found.iptm), abs=1e-3)
    assert entries["actifptm"] == pytest.approx(float(found.actifptm), abs=1e-4)
    for name, number in number_of.items():
        assert entries["per_chain_ptm"][name] == pytest.approx(float(found.chain_ptm[0, number - 1]), abs=1e-4)
    for pair in ("A-B", "A-C", "A-D", "B-C", "B-D", "C-D"):
        place = tuple(number_of[name] - 1 for name in pair.split("-"))
        assert entries["pairwise_iptm"][pair] == pytest.approx(float(found.pair_iptm[0][place]), abs=1e-4)
        assert entries["pairwise_actifptm"][pair] == pytest.approx(float(found.pair_actifptm[0][place]), abs=1e-4)
    assert len(set(entries["pairwise_iptm"].values())) == 6, "the test tells pairs apart"


def test_files_of_a_complex(trimer: PredictionResult) -> None:
    """Catches an entity for each chain, numbers of residues that go on, a ranking by pTM or pLDDT, a ranking_debug.json that
    AlphaFold-Multimer's readers do not understand, and results from before residue types were the sequences' that are kept."""
    block = gemmi.cif.read(str(trimer.structure())).sole_block()
    assert [row[0] for row in block.find("_entity.", ["id"])] == ["1", "2"]
    assert [[*row] for row in block.find("_struct_asym.", ["id", "entity_id"])] == [["A", "1"], ["B", "2"], ["C", "1"]]
    for chain in read_structure(trimer.structure(1)).chains.values():
        present = chain.mask.any(1)
        np.testing.assert_array_equal(chain.residue_number[present], 1 + np.flatnonzero(present))
    ranking = read_json(trimer.folder / "ranking.json")
    assert ranking["settings"]["numerics"] == NUMERICS["multimer"] > NUMERICS["monomer"]
    assert ranking["ranked_by"] == "0.8 ipTM + 0.2 pTM"
    scores = [0.8 * entry["iptm"] + 0.2 * entry["ptm"] for entry in ranking["ranking"]]
    assert scores == sorted(scores, reverse=True)
    debug = read_json(trimer.folder / "ranking_debug.json")
    assert debug["order"] == [f"seed_{entry['seed']}" for entry in ranking["ranking"]]
    assert list(debug["iptm+ptm"].values()) == pytest.approx(scores, abs=1e-4)
    assert list(debug["iptm+ptm"]) == debug["order"]
    scored = read_json(trimer.folder / "seed_0_scores.json")
    assert {"A-B", "B-A", "C-B"} <= scored["ipsae"].keys() == scored["pdockq2"].keys()
    assert scored["pdockq"].keys() == scored["contacts"].keys() == {"A-B", "A-C", "B-C"}


def test_interfaces_weigh_more_than_the_whole(tmp_path: Path) -> None:
    """Catches a ranking by pTM, and one that takes both scores for equally important."""
    mask = np.zeros((4, 37), np.float32)
    mask[:, CA] = 1
    given = {0: (0.9, 0.3), 1: (0.5, 0.45), 2: (0.1, 0.5)}  # pTM, ipTM
    structures = {}
    for seed, (ptm, iptm) in given.items():
        pairs = np.zeros((2, 2), np.float32)
        scores = ComplexScores(iptm, iptm, np.zeros(2, np.float32), pairs, pairs)
        error = AlignedError(np.ones((4, 4), np.float32), 31.75, ptm, scores)
        atoms = np.arange(4 * 37 * 3, dtype=np.float32).reshape(4, 37, 3)
        structures[seed] = PredictedStructure("x", np.zeros(4, int), atoms, mask, mask[:, CA] * 50, (2, 2), error)
    result = write_results(tmp_path, structures, "cif", {}, "x")
    assert list(result.mean_plddt) == [1, 0, 2]
    debug = {"iptm+ptm": {"seed_1": 0.46, "seed_0": 0.42, "seed_2": 0.42}, "order": ["seed_1", "seed_0", "seed_2"]}
    assert read_json(tmp_path / "ranking_debug.json") == debug


def test_a_complex_needs_a_multimer_model(tmp_path: Path, checkpoint: Path) -> None:
    """Catches chains that a model of single chains reads as one, and a run that ends because of one record."""
    outcome = predict_records(settings(tmp_path, checkpoint, f">two\n{QUERY}:{OTHER}\n>one\n{OTHER}\n"), silent)
    assert [result.name for result in outcome.results] == ["one"]
    (failure,) = outcome.failures
    assert failure.name == "two"
    assert "a complex of 2 chains, but" in failure.reason
    assert "give a multimer model" in failure.reason


def test_a_single_chain_is_a_complex_of_one(tmp_path: Path, multimer: Path) -> None:
    """Catches a multimer model that predicts complexes only, or ranks a single chain by interfaces that it has not."""
    lines: list[str] = []
    config = settings(tmp_path, multimer, f">one\n{OTHER}\n")
    (result,) = predict(config, lines.append)
    assert read_json(result.folder / "ranking.json")["ranked_by"] == "mean pLDDT"
    assert not (result.folder / "ranking_debug.json").exists()
    assert "iptm" not in read_json(result.folder / "seed_0_scores.json")
    assert "pairing" not in read_json(result.folder / "ranking.json")["settings"]


def test_results_of_complexes_are_kept(tmp_path: Path, multimer: Path) -> None:
    """Catches a complex that is predicted again, a format that is not added, and results of other chains that are kept."""
    config = settings(tmp_path, multimer, f">two\n{QUERY}:{OTHER}\n")
    (first,) = predict(config, silent)
    before = first.structure().read_bytes()
    (kept,) = predict(replace(config, format="pdb"), silent)
    chains = read_structure(kept.structure()).chains
    assert [chain.sequence for chain in chains.values()] == [QUERY, OTHER]
    assert first.structure().read_bytes() == before
    assert predict(config, silent)[0].kept
    with pytest.raises(UserError, match=r"holds results of another run \(sequence: "):
        predict(settings(tmp_path, multimer, f">two\n{QUERY + OTHER}\n"), silent)
    with pytest.raises(UserError, match=r"pairing: species there, none now"):
        predict(settings(tmp_path, multimer, f">two\n{QUERY}:{OTHER}\n", pairing="none"), silent)


def with_templates(root: Path) -> dict[str, Any]:
    """Options with templates: two structures like chains A and C, one like B."""
    for key, letters in {"1abc_A": QUERY[2:-1], "2abc_A": QUERY[4:], "3abc_B": OTHER[:4] + "A" + OTHER[5:]}.items():
        write_chain(root, key, letters.replace("X", "A"))
    (root / "train.txt").write_text("1abc\n2abc_A\n3abc_B\n")
    return {"templates": root / "mmcif_files", "template_chains": root / "train.txt"}


def test_templates_of_chains_reach_the_model(tmp_path: Path, multimer: Path) -> None:
    """Catches templates of complexes that are not used, or are those of another chain; and a log or a result without them."""
    lines: list[str] = []
    config = settings(tmp_path, multimer, f">trimer\n{':'.join(LETTERS)}\n", **with_templates(tmp_path))
    (result,) = predict(config, lines.append)
    said = [line for line in lines if "templates of" in line]
    assert [line.partition(":")[0] for line in said] == ["  templates of trimer_A", "  templates of trimer_B"]
    assert said[0].endswith("; the best 2 are used: 1abc_A, 2abc_A")
    assert said[1].endswith("; the best 2 are used: 3abc_B, 2abc_A")
    made = read_json(result.folder / "ranking.json")["settings"]
    assert made["templates"] == ["A:1abc_A", "A:2abc_A", "B:3abc_B", "B:2abc_A"]

    queries = [ProteinSequence(f"trimer_{name}", letters) for name, letters in zip("ABC", LETTERS, strict=True)]
    merged = merge([ChainMsas(one, query_only(encode(one.letters))) for one in queries])
    features = replace(SIZES, recycles=0, msa_clusters=6, extra_msa=4)
    source = template_source(config.template_settings)
    ((target,), _) = find_targets(config.inputs, None)
    found, _ = find_templates(source, target, 2)
    batch = collate([complex_sample(merged, features, 0, side_by_side(merged.entities, found))])
    assert batch["template_all_atom_masks"][0, 0, 0].amax(-1).sum() == 2 * 19 + 10
    with torch.no_grad():
        output = load_model(multimer)(batch)
    chains = read_structure(result.structure(0)).chains
    for name, number in (("A", 1), ("B", 3), ("C", 2)):
        own = output.structure.positions[0, batch["asym_id"][0, 0] == number].numpy()
        present = chains[name].mask > 0
        np.testing.assert_allclose(chains[name].positions[present], own[present], atol=1e-3)
    with pytest.raises(UserError, match=r"holds results of another run \(templates: "):
        predict(replace(config, templates=None, template_chains=None), silent)


def test_chains_whose_templates_cannot_be_read(tmp_path: Path, multimer: Path) -> None:
    """Catches a chain without a search that ends the run, and a truncated search that is read as one with fewer hits."""
    folder = tmp_path / "alignments" / "two_A"
    write_alignment(folder, QUERY)
    with_templates(tmp_path)
    text = f"# STOCKHOLM 1.0\n2abc_A/1-18  ----{QUERY[4:]}\n//\n"
    (folder / "hmm_output.sto").write_text(text)
    options = {"alignments": tmp_path / "alignments", "templates": tmp_path / "mmcif_files"}
    config = settings(tmp_path, multimer, f">two\n{QUERY}:{OTHER}\n", **options)
    lines: list[str] = []
    (result,) = predict(config, lines.append)
    assert read_json(result.folder / "ranking.json")["settings"]["templates"] == ["A:2abc_A"]
    assert "  templates of two_B: none; no folder with search results of this record" in lines
    (folder / "hmm_output.sto").write_text(text.removesuffix("//\n"))
    with pytest.raises(UserError, match=r"two_A/hmm_output\.sto:2: no '//' at the end"):
        predict(replace(config, output=tmp_path / "other"), silent)


@pytest.mark.verify
@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_predict_what_one_does(tmp_path: Path, multimer: Path, pool: RankPool, ranks: int) -> None:
    """Catches scores of one rank's rows only, and ranks that disagree about the passes or the order of the chains."""
    write_alignment(tmp_path / "alignments" / "x_A", QUERY)
    options = {"recycles": 4, "stop_tolerance": 1e3, "alignments": tmp_path / "alignments", **with_templates(tmp_path)}
    single = settings(tmp_path, multimer, f">x\n{':'.join(LETTERS)}\n", **options)
    (one,) = predict(single, silent)
    config = replace(single, output=tmp_path / "sharded", parallel=SequenceConfig(ranks))
    assert pool.run(ranks, predict_on_rank, config) == [["x"]] * ranks
    files = [folder / "x" for folder in (single.output, config.output)]
    first, second = ([*read_structure(folder / "seed_0.cif").chains.values()] for folder in files)
    for a, b in zip(first, second, strict=True):
        assert a.sequence == b.sequence
        np.testing.assert_allclose(a.positions, b.positions, atol=2e-3)
    scores, sharded = (read_json(folder / "seed_0_scores.json") for folder in files)
    assert scores.keys() == sharded.keys()
    for key, value in scores.items():
        ours, theirs = ([*x.values()] if isinstance(x, dict) else x for x in (value, sharded[key]))
        np.testing.assert_allclose(ours, theirs, atol=0.011, err_msg=key)
    assert "iptm" in scores
    passes = [len(read_json(folder / "timings.json")["seeds"][0]["pass_seconds"]) for folder in files]
    assert passes == [3, 3], "one more pass after the structure has settled in the second"
    assert predict(replace(config, parallel=SequenceConfig()), silent)[0].kept
    assert one.folder == files[0]


def test_the_page_shows_chains(trimer: PredictionResult) -> None:
    """Catches a page that draws the chains as one, residues numbered through, and a table of interfaces of another pair."""
    page = (trimer.folder / "report.html").read_text()
    data = embedded(page)
    chains = [(chain["name"], chain["start"], chain["end"]) for chain in data["chains"]]
    assert chains == [("A", 0, 22), ("B", 22, 32), ("C", 32, 54)]
    assert len({chain["colour"] for chain in data["chains"]}) == 3
    assert "Predicted structure of 3 chains, 54 residues." in page
    borders = re.search(r'<svg class="borders".*?</svg>', page, re.DOTALL)
    assert borders is not None
    assert re.findall(r'y1="([\d.]+)" y2="([\d.]+)"', borders[0])[:2] == [("40.741", "40.741"), ("59.259", "59.259")]
    charts = re.findall(r'<svg[^>]*class="along".*?</svg>', page, re.DOTALL)
    assert charts
    assert all(chart.count('class="border"') == 2 for chart in charts)
    scores = read_json(trimer.folder / f"seed_{trimer.best}_scores.json")
    for pair in ("A-B", "A-C", "B-C"):
        back = "-".join(reversed(pair.split("-")))
        cells = [
            f"{scores['pairwise_iptm'][pair]:.3f}",
            f"{max(scores['ipsae'][pair], scores['ipsae'][back]):.3f}",
            f"{scores['pdockq'][pair]:.3f}",
            f"{max(scores['pdockq2'][pair], scores['pdockq2'][back]):.3f}",
            f"{scores['contacts'][pair]:,}",
        ]
        assert re.search(rf"<td[^>]*>{pair}</td>\s*" + r"\s*".join(f"<td[^>]*>{cell}</td>" for cell in cells), page), (
            pair
        )
    index = (trimer.folder.parent / "index.html").read_text()
    assert ">ipTM<" in index


def test_edited_scores_of_a_complex_are_one_line(trimer: PredictionResult, tmp_path: Path) -> None:
    """Catches a KeyError for a pair that somebody has deleted, and numbers that are none."""
    folder = Path(shutil.copytree(trimer.folder, tmp_path / "x"))
    scores = folder / f"seed_{trimer.best}_scores.json"
    content = read_json(scores)
    for broken in ({"A-B": 0.1}, [], {"A-B": "x", "A-C": 0.1, "B-C": 0.1}):
        scores.write_text(json.dumps({**content, "pairwise_iptm": broken}))
        with pytest.raises(UserError, match=r"_scores\.json: not written by evodsp predict \(pairwise_iptm of A-"):
            write_target_page(folder, [])


def test_predictions_of_complexes_in_python(tmp_path: Path, multimer: Path, trimer: PredictionResult) -> None:
    """Catches chains that Python does not take or does not tell apart, and a trace that links them."""
    one = api_predict(f"{QUERY}:{OTHER}", checkpoint=multimer, report=silent, recycles=0, device="cpu", msa_clusters=6)
    assert [chain.name for chain in one.chains] == ["A", "B"]
    assert [one.sequence[chain.residues] for chain in one.chains] == [QUERY, OTHER]
    assert one.positions[one.chains[1].residues].shape == (len(OTHER), 37, 3)
    entry = read_json(one.folder / "ranking.json")["ranking"][0]
    assert (one.iptm, one.ptm) == (entry["iptm"], entry["ptm"])
    assert f"ipTM {one.iptm:.2f}" in repr(one)
    assert "2 chains" in one._repr_html_()
    read = Prediction.read(trimer.folder)
    assert [chain.start for chain in read.chains] == [0, 22, 32]
    assert read.to_cif() == trimer.structure().read_text()
    assert {line[21] for line in read.to_pdb().splitlines() if line.startswith("ATOM")} == {"A", "B", "C"}
    # Links: one less than residues in each chain, and none at X, which has no CA and is inside of A and C.
    assert str(read.show().picture).count('stroke="white"') == 54 - 3 - 4


def test_alignments_of_chains_in_python(tmp_path: Path) -> None:
    """Catches alignments of chains that are no record's, and one that is left out because nobody knows whose it is."""
    text = f">q\n{OTHER}\n>h\n{OTHER[:-1]}W\n"
    given = as_given_files({"x": f"{QUERY}:{OTHER}"}, {"x_B": text}, None, tmp_path)
    assert given.alignments is not None
    ((target,), _) = find_targets(given.inputs, given.alignments)
    assert [chain.alignments for chain in target.chains] == [None, tmp_path / "alignments" / "x_B"]
    for inputs, alignments in (({"x": f"{QUERY}:{OTHER}"}, {"x": text}), (f"{QUERY}:{OTHER}", text)):
        with pytest.raises(
            UserError, match=r"one alignment for the 2 chains of '\w+'; give \{'\w+_A': alignment, '\w+_B'"
        ):
            as_given_files(inputs, alignments, None, tmp_path)
    with pytest.raises(UserError, match=r"an alignment for 'x_C', which is no record\. Did you mean 'x_"):
        as_given_files({"x": f"{QUERY}:{OTHER}"}, {"x_C": text}, None, tmp_path)


def test_a_chain_with_the_name_of_its_complex(tmp_path: Path) -> None:
    """Catches the folder of the complex that is taken for the chain's, whose alignments are then not read."""
    (tmp_path / "a.fasta").write_text(f">a\n{QUERY}\n>b\n{OTHER}\n")
    folder = tmp_path / "alignments"
    for place, letters in (("a/A", QUERY), ("b", OTHER)):
        (folder / place).mkdir(parents=True)
        (folder / place / "x.a3m").write_text(f">q\n{letters}\n")
    ((target,), _) = find_targets([tmp_path / "a.fasta"], folder, one_complex=True)
    assert [chain.alignments for chain in target.chains] == [folder / "a" / "A", folder / "b"]
    (folder / "a" / "A").rename(folder / "moved")
    (folder / "moved" / "x.a3m").rename(folder / "a" / "x.a3m")
    ((target,), _) = find_targets([tmp_path / "a.fasta"], folder, one_complex=True)
    assert [chain.alignments for chain in target.chains] == [folder / "a", folder / "b"]


def test_many_chains(tmp_path: Path) -> None:
    """Catches names that repeat after Z, chains that are read in the order A, AA, B, and a PDB file without names for all."""
    assert [chain_name(number) for number in (0, 25, 26, 51, 52, MOST_CHAINS - 1)] == ["A", "Z", "AA", "AZ", "BA", "ZZ"]
    residues = MOST_IN_PDB + 1
    mask = np.zeros((residues, 37), np.float32)
    mask[:, CA] = 1
    rng = np.random.default_rng(0)
    positions = rng.normal(size=(residues, 37, 3)).astype(np.float32) * 50
    aatype = np.arange(residues) % 20
    many = PredictedStructure("x", aatype, positions, mask, np.full(residues, 50, np.float32), (1,) * residues)
    names = [chain.name for chain in many.chains]
    block = gemmi.cif.read_string(structure_text(many, "cif")).sole_block()
    assert list(dict.fromkeys(block.find_values("_atom_site.auth_asym_id"))) == names
    assert len(block.find_values("_entity.id")) == 20
    with pytest.raises(UserError, match=r"x: 63 chains, but a PDB file holds 62; use --format cif"):
        structure_text(many, "pdb")
    fewer = replace(many, lengths=(2, *(1,) * (residues - 2)))
    text = structure_text(fewer, "pdb")
    found = list(dict.fromkeys(line[21] for line in text.splitlines() if line.startswith("ATOM")))
    assert "".join(found) == string.ascii_uppercase + string.ascii_lowercase + string.digits
    (tmp_path / "x.cif").write_text(structure_text(many, "cif"))
    assert "".join(chain.sequence for chain in _read_chains(tmp_path / "x.cif")) == many.sequence


FIRST, SECOND = "ACDEFGHIKL", "MNPQRST"


def write_alignments(folder: Path, letters: str, name: str, species: str = "BOVIN") -> None:
    """An alignment with a row of an entry, and rows for pairing of which one has this species."""
    folder.mkdir(parents=True)
    (folder / "family.a3m").write_text(f">q\n{letters}\n>2xyz_{name}\nW{letters[1:]}\n>alone\n{letters[:-1]}-\n")
    rows = f">sp|P12345|X_{species}\n{letters[:-1]}W\n>sp|P12346|X_YEAST{name}\n{letters[:-2]}WW\n"
    (folder / "uniprot_hits.a3m").write_text(f">q\n{letters}\n{rows}")


def target_of(root: Path, text: str, alignments: Path | None, pairing: Pairing = "species") -> Target:
    (root / "x.fasta").write_text(text)
    (target, *_), failures = find_targets([root / "x.fasta"], alignments, pairing=pairing)
    assert not failures
    return target


def rows_of(target: Target) -> list[str]:
    """The rows of the MSA, with the chains in the order in which they were given."""
    found = ComplexMsa.read(target).alignments
    return [decode(row) for row in found[0].residues] if found else []


DIMER = f">x\n{SECOND}:{FIRST}\n"


@pytest.mark.parametrize(
    ("first", "second", "others"),
    [("x_A", "x_B", True), ("x/A", "x/B", True), ("A", "B", False), ("x_A", "x/B", True)],
    ids=["x_A", "x/A", "A", "both"],
)
def test_where_alignments_of_chains_lie(tmp_path: Path, first: str, second: str, others: bool) -> None:
    """Catches a layout that is not found, and the alignments of one record's chain A for every record."""
    folder = tmp_path / "alignments"
    write_alignments(folder / first, SECOND, "A")
    write_alignments(folder / second, FIRST, "B")
    more = ">y\nAC:DE\n" if others else ""
    target = target_of(tmp_path, DIMER + more, folder)
    assert [chain.alignments for chain in target.chains] == [folder / first, folder / second]
    assert not target.notes
    rows = rows_of(target)
    assert rows[0] == SECOND + FIRST
    assert rows[1] == SECOND[:-1] + "W" + FIRST[:-1] + "W", "rows of one species stand beside one another"
    gaps = {(row[: len(SECOND)].strip("-") == "", row[len(SECOND) :].strip("-") == "") for row in rows[2:]}
    assert gaps == {(True, False), (False, True)}
    if not others:  # A may be any record's
        several = target_of(tmp_path, DIMER + ">y\nAC:DE\n", folder)
        assert [chain.alignments for chain in several.chains] == [None, None]


def test_a_chain_that_was_a_record_keeps_its_alignments(tmp_path: Path) -> None:
    """Catches the folders of training, 1abc_D, that are not found for the complex 1abc, whose chains are called A and B."""
    folder = tmp_path / "alignments"
    write_alignments(folder / "1abc_D", FIRST, "D")
    (tmp_path / "1abc.fasta").write_text(f">1abc_D\n{FIRST}\n>1abc_E\n{SECOND}\n")
    (target,), _ = find_targets([tmp_path / "1abc.fasta"], folder, one_complex=True)
    assert [chain.alignments for chain in target.chains] == [folder / "1abc_D", None]
    (note,) = target.notes
    assert note.startswith(f"no alignments for 1abc_E in {folder}: predicted from its sequence alone")
    assert target.notes_of_many == target.notes, "a complex of which one chain has alignments is not alone"
    assert rows_of(target)[1:] == [f"W{FIRST[1:]}-------", f"{FIRST[:-1]}--------"]


def test_identical_chains_need_alignments_once(tmp_path: Path) -> None:
    """Catches copies that are predicted from their sequence alone because only one of them, not the first, has a folder."""
    folder = tmp_path / "alignments"
    write_alignments(folder / "x_B", FIRST, "B")
    target = target_of(tmp_path, f">x\n{FIRST}:{FIRST}\n", folder)
    assert not target.notes
    assert rows_of(target)[1:] == [2 * ("W" + FIRST[1:]), 2 * (FIRST[:-1] + "-")]
    assert not target.pairs


@pytest.mark.parametrize(
    ("pairing", "paired"),
    [
        ("species", [(SECOND[:-1] + "W", FIRST[:-1] + "W")]),
        ("entry", [("W" + SECOND[1:], "W" + FIRST[1:])]),
        ("none", []),
    ],
)
def test_rules_for_pairing(tmp_path: Path, pairing: Pairing, paired: list[tuple[str, str]]) -> None:
    """Catches a rule that is not heeded."""
    folder = tmp_path / "alignments"
    write_alignments(folder / "x_A", SECOND, "A")
    write_alignments(folder / "x_B", FIRST, "B")
    target = target_of(tmp_path, DIMER, folder, pairing)
    whole = [row for row in rows_of(target)[1:] if row[0] != "-" and row[-2] != "-"]
    assert whole == ["".join(parts) for parts in paired]


def test_the_fingerprint_covers_rows_for_pairing(tmp_path: Path) -> None:
    """Catches results that are kept although the rows that were paired have changed; and others that are not kept."""
    folder = tmp_path / "alignments"
    write_alignments(folder / "x_A", SECOND, "A")
    write_alignments(folder / "x_B", FIRST, "B")
    one, alone = target_of(tmp_path, DIMER, folder), target_of(tmp_path, DIMER, folder, "none")
    before, without = one.digest, alone.digest
    with (folder / "x_B" / "uniprot_hits.a3m").open("a") as file:
        file.write(f">sp|P1|A_HUMAN\n{FIRST}\n")
    assert one.digest != before
    assert alone.digest == without


def test_rows_of_colabfolds_alignment(tmp_path: Path) -> None:
    """Catches rows of one chain that are paired, paired rows that come apart, and copies without their rows."""
    width = len(FIRST)
    rows = (
        f">101\t102\n{FIRST}{SECOND}\n>p1\tp2\nW{FIRST[1:]}{SECOND[:-1]}W\n>q1\tq2\n{FIRST[:-1]}Y{SECOND[:-1]}Y\n"
        f">101\n{FIRST}{'-' * len(SECOND)}\n>u\nK{FIRST[1:]}{'-' * len(SECOND)}\n>102\n{'-' * width}{SECOND}\n"
        f">v\n{'-' * width}aa{SECOND[:-1]}K\n"
    )
    (tmp_path / "x.a3m").write_text(f"#{width},{len(SECOND)}\t2,1\n{rows}")
    (target,), _ = find_targets([tmp_path / "x.a3m"], None)
    found = ComplexMsa.read(target)
    own = [(row[:width], row[width : 2 * width], row[2 * width :]) for row in rows_of(target)]
    assert own[:3] == [
        (FIRST, FIRST, SECOND),
        ("W" + FIRST[1:], "W" + FIRST[1:], SECOND[:-1] + "W"),
        (FIRST[:-1] + "Y", FIRST[:-1] + "Y", SECOND[:-1] + "Y"),
    ]
    gaps = "-" * width
    assert sorted(own[3:]) == sorted(
        [("K" + FIRST[1:], "K" + FIRST[1:], "-" * len(SECOND)), (gaps, gaps, SECOND[:-1] + "K")]
    )
    assert found.merged.deletions[-1, 2 * width] == 2
    assert not target.pairs
    assert found.line == "5 rows in the MSA of all chains, 2 of them paired"
    assert np.count_nonzero(found.merged.block == 0) == 3
