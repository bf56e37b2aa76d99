"""Arrays that `evodsp predict --save` keeps: those of the model, in the order of the residues, added later, refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

import evodsp
from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.inference import representations, seeds
from evodsp.inference.predict import predict
from evodsp.inference.prediction import Prediction
from evodsp.inference.result_checks import FIX
from evodsp.model.alphafold import AlphaFold
from evodsp.model.heads import ModelOutput, compute_contacts, compute_plddt
from evodsp.model.recordings import Rerun
from evodsp.weights.checkpoint import load_model
from tests.builders.prediction import read_json, silent

from .conftest import LETTERS, OTHER, QUERY, Finished, Workplace, settings

ALL = "single,pair,msa,distogram,structure_module"


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[ModelOutput]:
    """The output of each pass that is run, as it was."""
    found: list[ModelOutput] = []
    real = AlphaFold.one_pass

    def one_pass(self: AlphaFold, *given: Any) -> ModelOutput:
        output = real(self, *given)
        copies = {name: x.clone() for name, x in output.representations.items()}
        found.append(replace(output, representations=copies))
        return output

    monkeypatch.setattr(AlphaFold, "one_pass", one_pass)
    return found


def expected(output: ModelOutput) -> dict[str, Tensor]:
    """The arrays of a pass."""
    own = {name: output.representations[name] for name in ("single", "pair", "msa")}
    named = own | {"distogram": output.logits["distogram"], "structure_module": output.structure.single}
    return {name: x[0] for name, x in named.items()}


def saved_in(folder: Path, seed: int = 0) -> dict[str, np.ndarray]:
    return dict(np.load(folder / f"seed_{seed}_representations.npz"))


@pytest.mark.verify_but("auto")
@pytest.mark.parametrize("memory", ["auto", "0.004MB"])
def test_arrays_are_those_of_each_pass(workplace: Workplace, outputs: list[ModelOutput], memory: str) -> None:
    """Catches arrays of another pass, of a pair that the next pass has overwritten, rows or residues in another order."""
    workplace.only("alpha_A")
    asked = {"save": ALL, "recycles": 2, "seeds": 1, "working_memory": memory}
    every = predict(workplace.change(**asked, save_passes="all"), silent)[0]
    of_passes = [expected(output) for output in outputs]
    assert len(of_passes) == 3
    arrays = saved_in(every.folder)
    for name, x in arrays.items():
        if name != "distogram_edges":
            np.testing.assert_array_equal(x, torch.stack([one[name] for one in of_passes]).numpy(), err_msg=name)
    residues = len(QUERY)
    assert arrays["pair"].shape[:3] == (3, residues, residues)
    assert arrays["msa"].shape[:3] == (3, 4, residues), "five clusters, of which one is left for a template"
    last = predict(workplace.change(**asked, output=workplace.root / "last"), silent)[0]
    for name, x in saved_in(last.folder).items():
        np.testing.assert_array_equal(x, arrays[name] if name == "distogram_edges" else arrays[name][-1])


def test_residues_of_a_complex_are_as_they_were_given(tmp_path: Path, multimer: Path) -> None:
    """Catches arrays in the order of the model's columns, in which chain C stands before B."""
    config = settings(tmp_path, multimer, f">trimer\n{':'.join(LETTERS)}\n", save=ALL)
    found = Prediction.of(predict(config, silent)[0])
    arrays = {name: torch.from_numpy(x) for name, x in found.representations.items()}
    model = load_model(multimer)
    edges = arrays["distogram_edges"]
    contacts = compute_contacts(arrays["distogram"], float(edges[0]), float(edges[-1]))
    assert found.contacts is not None
    np.testing.assert_allclose(contacts, found.contacts, atol=1 / 255)
    with torch.no_grad():
        logits = model.heads["plddt"](arrays["structure_module"][None])
        of_pair = model.heads["distogram"](arrays["pair"][None])[0]
        row = model.single(arrays["msa"][0])
    np.testing.assert_allclose(compute_plddt(logits)[0], found.plddt, atol=0.006)
    np.testing.assert_allclose(of_pair, arrays["distogram"], atol=1e-4)
    np.testing.assert_allclose(row, arrays["single"], atol=1e-4)


def test_padding_is_left_out(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows and residues that a recorded pass adds, which would look like a part of the protein."""
    workplace.only("alpha_A")
    config = workplace.change(save=ALL, recycles=2, seeds=1, msa_clusters=10)
    launched = predict(replace(config, cuda_graphs=False), silent)[0]
    monkeypatch.setattr(seeds, "recorder_of", lambda _: Rerun())
    recorded = predict(replace(config, output=workplace.root / "recorded"), silent)[0]
    as_usual = saved_in(launched.folder)
    for name, x in saved_in(recorded.folder).items():
        assert x.shape == as_usual[name].shape, name
        np.testing.assert_allclose(x, as_usual[name], atol=1e-4 * np.abs(x).max(), err_msg=name)


@pytest.mark.verify
def test_arrays_are_added_to_a_finished_prediction(
    workplace: Workplace, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches seeds that are ranked twice, other numbers, arrays that are computed again, or taken for others."""
    workplace.only("alpha_A")
    folder = finished.results[0].folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    runs: list[int] = []
    real = seeds.run_passes
    monkeypatch.setattr(seeds, "run_passes", lambda *given: runs.append(1) or real(*given))

    def seeds_run(**change: Any) -> int:
        runs.clear()
        kept = predict(workplace.change(**change), silent)[0].kept
        assert kept == (not runs)
        return len(runs)

    assert seeds_run(save="single,pair") == 2
    entries = read_json(folder / "ranking.json")["ranking"]
    saved = {"arrays": ["single", "pair"], "dtype": "float32", "passes": "last"}
    names = [f"seed_{entry['seed']}_representations.npz" for entry in entries]
    assert [entry.pop("saved") for entry in entries] == [{"file": name, **saved} for name in names]
    former = read_json(finished.results[0].folder / "timings.json")["seeds"]
    assert sorted(entry["seed"] for entry in former) == [0, 1]
    for name, content in before.items():
        if name.endswith((".cif", "_scores.json", "_contacts.npz")):
            assert (folder / name).read_bytes() == content, name
    assert seeds_run(save="pair") == 0, "they are there"
    assert seeds_run() == 0, "no array is asked for"
    assert seeds_run(seeds=3, save="pair") == 1
    assert seeds_run(save="pair", save_dtype="float16") == 2
    assert saved_in(folder)["pair"].dtype == np.float16
    assert seeds_run(save="msa", save_dtype="float16") == 2
    (folder / "seed_1_representations.npz").unlink()
    assert seeds_run(save="msa", save_dtype="float16") == 1
    assert [entry["seed"] for entry in read_json(folder / "ranking.json")["ranking"]].count(1) == 1


def test_bfloat16_in_safetensors(workplace: Workplace) -> None:
    """Catches numbers of another type, and a file that Python does not read back."""
    workplace.only("beta_A")
    options: dict[str, Any] = {"save_format": "safetensors", "save_dtype": "bfloat16"}
    short = predict(workplace.change(save="pair,distogram", seeds=1, **options), silent)[0]
    whole = predict(workplace.change(save="pair", seeds=1, output=workplace.root / "whole"), silent)[0]
    arrays = Prediction.of(short).representations
    assert sorted(arrays) == ["distogram", "distogram_edges", "pair"]
    assert arrays["pair"].dtype == torch.bfloat16
    assert torch.equal(arrays["pair"], torch.from_numpy(saved_in(whole.folder)["pair"]).bfloat16())
    assert Prediction.of(finished_without(workplace)).representations == {}


def finished_without(workplace: Workplace) -> Any:
    return predict(workplace.change(seeds=1, output=workplace.root / "none"), silent)[0]


def test_damaged_files_are_one_line(workplace: Workplace) -> None:
    """Catches a traceback for a file that was cut, or that is not there."""
    workplace.only("beta_A")
    folder = predict(workplace.change(save="single", seeds=1), silent)[0].folder
    file = folder / "seed_0_representations.npz"
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"seed_0_representations\.npz: .*--overwrite"):
        _ = Prediction.read(folder).representations
    np.savez(file, other=np.zeros(1))
    with pytest.raises(UserError, match=f"it has no array single.*{FIX}"):
        _ = Prediction.read(folder).representations
    file.unlink()
    with pytest.raises(UserError, match="is missing"):
        _ = Prediction.read(folder).representations
    ranking = (folder / "ranking.json").read_text()
    (folder / "ranking.json").write_text(ranking.replace(file.name, ""))
    with pytest.raises(UserError, match="is missing"):
        _ = Prediction.read(folder).representations


@pytest.mark.parametrize("file_format", ["npz", "safetensors"])
def test_a_full_disk_leaves_nothing(workplace: Workplace, monkeypatch: pytest.MonkeyPatch, file_format: Any) -> None:
    """Catches a traceback of the library that writes the file, and a result without its arrays."""
    full = {"npz": OSError(28, "No space left on device"), "safetensors": SafetensorError("No space left on device")}

    def refuse(*_: Any, **__: Any) -> None:
        raise full[file_format]

    monkeypatch.setattr(np, "savez", refuse)
    monkeypatch.setattr(representations, "save_file", refuse)
    with pytest.raises(UserError, match=r"cannot be written .*No space left on device.*; make room"):
        predict(workplace.change(save="single", save_format=file_format, seeds=1), silent)
    assert not list(workplace.config.output.glob("*/*"))


@pytest.mark.verify
def test_the_estimate_says_how_large_they_are(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an estimate that is not the size of the file."""
    workplace.only("alpha_A")
    options = ["--save", ALL, "--save_passes", "all", "--recycles", "2", "--msa_clusters", "5", "--extra_msa", "4"]
    words = [*options, "--checkpoint", str(workplace.config.checkpoint), "--device", "cpu"]
    output = workplace.root / "estimate.json"
    assert main(["estimate", str(workplace.config.fasta), *words, "--output", str(output)]) == 0
    assert "saved of a seed: single " in capsys.readouterr().out
    (entry,) = read_json(output)
    folder = predict(workplace.change(save=ALL, save_passes="all", recycles=2, seeds=1), silent)[0].folder
    arrays = saved_in(folder)
    del arrays["distogram_edges"]
    assert entry["saved_bytes"] == {name: x.nbytes for name, x in arrays.items()}


def test_from_python(workplace: Workplace) -> None:
    """Catches an option that the function does not take."""
    model = evodsp.load_model(str(workplace.config.checkpoint))
    found = evodsp.predict(QUERY, checkpoint=model, seeds=1, recycles=0, save="pair")
    assert found.representations["pair"].shape[:2] == (len(QUERY), len(QUERY))


@pytest.mark.verify_but("2-262144")
@pytest.mark.parametrize("pairs", [1, 1 << 18])
@pytest.mark.parametrize("recycles", [0, 2])
def test_embedding_is_what_predict_saves(workplace: Workplace, ptm_checkpoint: Path, recycles: int, pairs: int) -> None:
    """Catches a pass too few, features of another seed or set, and padding of a batch that changes a sequence."""
    config = workplace.change(checkpoint=ptm_checkpoint, save="single,pair,msa", seeds=1, recycles=recycles)
    expected = {one.name: Prediction.of(one).representations for one in predict(config, silent)}
    model = load_model(ptm_checkpoint)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = evodsp.embed(
        workplace.config.fasta,
        workplace.config.alignments,
        model,
        ["single", "pair", "msa"],
        recycles,
        5,
        4,
        pairs=pairs,
    )
    names = []
    for name, arrays in found:
        names.append(name)
        assert list(arrays) == ["single", "pair", "msa"]
        for array, x in arrays.items():
            np.testing.assert_allclose(x, expected[name][array], atol=2e-5 * np.abs(expected[name][array]).max())
    assert names == ["beta_A", "alpha_A"], "the shortest first"
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_embedding_of_a_complex_and_of_one_that_fails(
    multimer: Path, ptm_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches columns of the model's order, and a record that costs the others their representations."""
    both = {"one": QUERY, "trimer": ":".join(LETTERS)}
    for checkpoint, names in ((multimer, ["one", "trimer"]), (ptm_checkpoint, ["one"])):
        found = dict(
            evodsp.embed(both, checkpoint=checkpoint, arrays=["pair"], recycles=0, msa_clusters=6, extra_msa=4)
        )
        assert list(found) == names
    assert (
        "evodsp: trimer: trimer: a complex of 3 chains, but the model is a model of single chains"
        in capsys.readouterr().err
    )
    chains = evodsp.predict(
        both, checkpoint=str(multimer), recycles=0, msa_clusters=6, extra_msa=4, save="pair", device="cpu"
    )
    ours = dict(evodsp.embed(both, checkpoint=multimer, arrays=["pair"], recycles=0, msa_clusters=6, extra_msa=4))
    for name, one in chains.items():
        saved = one.representations["pair"]
        np.testing.assert_allclose(ours[name]["pair"], saved, atol=2e-5 * np.abs(saved).max())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"arrays": ["distogram"]}, "array 'distogram' is not of the trunk; evodsp.predict"),
        ({"arrays": ["singles"]}, "array 'singles'.*'single'"),
        ({"arrays": []}, "no array is asked for"),
        ({"checkpoint": None}, "no model is given"),
        ({"pairs": 0}, "pairs is 0"),
        ({"recycle": 3}, "no option 'recycle'. Did you mean 'recycles'"),
    ],
)
def test_wrong_arguments_of_embed_are_one_line(checkpoint: Path, given: dict[str, Any], said: str) -> None:
    """They are said by the call, not when the first record is asked for."""
    with pytest.raises(UserError, match=f"evodsp.embed: {said}"):
        evodsp.embed("MKTA", **{"checkpoint": checkpoint, **given})


def test_rows_of_each_sequence(workplace: Workplace, checkpoint: Path) -> None:
    """Catches rows of another sequence of the batch."""
    alignments = {"long": workplace.config.alignments / "alpha_A"}
    both = {"long": QUERY, "short": OTHER}
    rows = {
        name: len(found["msa"])
        for name, found in evodsp.embed(both, alignments, checkpoint, ["msa"], recycles=0, msa_clusters=5, extra_msa=4)
    }
    assert rows == {"short": 1, "long": 4}


def test_too_little_memory_and_bad_numbers_cost_one_record(
    workplace: Workplace, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a batch that ends all records because it, or one of them, does not fit; and nan that is taken for a result."""
    real, sizes = AlphaFold.trunk, list[tuple[int, int]]()

    def trunk(self: AlphaFold, members: Any, *rest: Any) -> dict[str, Tensor]:
        records, residues = members[0]["aatype"].shape
        sizes.append((records, residues))
        if records > 1 or residues == len(QUERY):
            raise MemoryError
        found = real(self, members, *rest)
        return found | {"single": found["single"] * (float("nan") if residues == 3 else 1)}

    monkeypatch.setattr(AlphaFold, "trunk", trunk)
    given = {"long": QUERY, "short": OTHER, "nan": "MKT", "other": OTHER}
    found = dict(evodsp.embed(given, checkpoint=checkpoint, recycles=0))
    assert list(found) == ["short", "other"]
    assert sizes == [(4, 22), (2, 10), (1, 3), (1, 10), (2, 22), (1, 10), (1, 22)]
    error = capsys.readouterr().err
    assert "long: 22 residues do not fit into the memory of this machine" in error
    assert "nan: its single has numbers that are nan or infinite" in error


def test_embedding_in_half_precision(checkpoint: Path) -> None:
    """Catches layers in float32 that --precision bf16 of predict has in bfloat16."""
    ((_, half),) = evodsp.embed(QUERY, checkpoint=checkpoint, precision="bf16", recycles=0)
    ((_, whole),) = evodsp.embed(QUERY, checkpoint=checkpoint, recycles=0)
    assert half["single"].dtype == torch.bfloat16
    difference = (half["single"].float() - whole["single"]).abs().max() / whole["single"].abs().max()
    assert 0 < difference < 0.1
