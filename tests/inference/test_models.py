"""Several models predict the same records: names, files, one ranking, and models that are added later."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import evodsp
from evodsp.cli import main
from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.inference import command, seeds
from evodsp.inference.config import PredictConfig
from evodsp.inference.groups import Groups
from evodsp.inference.jobs import find_models
from evodsp.inference.predict import predict, predict_records
from evodsp.model.alphafold import AlphaFold
from evodsp.parallel.group import Group
from evodsp.weights.checkpoint import save_model
from tests.builders.parameters import noisy
from tests.builders.prediction import read_json, silent
from tests.ranks import RankPool

from .conftest import TRAINED, Finished, Workplace


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second model."""
    torch.manual_seed(5)
    model = noisy(AlphaFold(ModelConfig.preset("test")))
    path = tmp_path_factory.mktemp("other") / "second.ckpt"
    save_model(path, model, features=TRAINED)
    return path


def runs_of_the_model(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one in each run of a model."""
    runs: list[int] = []
    real = seeds.run_passes
    monkeypatch.setattr(seeds, "run_passes", lambda *given: runs.append(1) or real(*given))
    return runs


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_models_and_seeds_are_ranked_together(
    workplace: Workplace, other_checkpoint: Path, predicted: Finished
) -> None:
    """Catches files that overwrite those of the other model, a ranking of one model only, and a structure unlike that of its
    model alone."""
    both = [workplace.config.checkpoint, other_checkpoint]
    lines: list[str] = []
    results = predict(workplace.change(checkpoint=both), lines.append)
    assert [result.name for result in results] == ["alpha_A", "beta_A"]
    folder = results[0].folder
    stems = [f"{model}_seed_{seed}" for model in ("tiny", "second") for seed in (0, 1)]
    endings = (".cif", "_contacts.npz", "_scores.json")
    files = {"ranking.json", "timings.json", "report.html"}
    assert names_in(folder) == files | {stem + end for stem in stems for end in endings}
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(f">{model}, seed {seed} (" in page for model in ("tiny", "second") for seed in (0, 1))
    ranking = read_json(folder / "ranking.json")
    assert ranking["ranked_by"] == "mean pLDDT"
    assert {(entry["model"], entry["seed"]) for entry in ranking["ranking"]} == {
        (model, seed) for model in ("tiny", "second") for seed in (0, 1)
    }
    scores = [entry["mean_plddt"] for entry in ranking["ranking"]]
    assert scores == sorted(scores, reverse=True)
    assert set(ranking["models"]) == {"tiny", "second"}
    assert ranking["models"]["tiny"]["checkpoint"] != ranking["models"]["second"]["checkpoint"]
    assert results[0].structure() == folder / ranking["ranking"][0]["structure"]
    assert results[0].best == f"{ranking['ranking'][0]['model']}_seed_{ranking['ranking'][0]['seed']}"
    timed = [(entry["model"], entry["seed"]) for entry in read_json(folder / "timings.json")["seeds"]]
    assert timed == [("tiny", 0), ("tiny", 1), ("second", 0), ("second", 1)]
    workplace.only("alpha_A")
    (second,) = predict(workplace.change(checkpoint=other_checkpoint, output=workplace.root / "second"), silent)
    for alone, model in ((predicted.results[0], "tiny"), (second, "second")):
        for seed in (0, 1):
            expected = (alone.folder / f"seed_{seed}.cif").read_bytes()
            assert (folder / f"{model}_seed_{seed}.cif").read_bytes() == expected
    assert any(line.startswith("model second, 2 of 2: ") for line in lines)


@pytest.fixture(scope="module")
def third_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A third model."""
    path = tmp_path_factory.mktemp("third") / "third.ckpt"
    save_model(path, AlphaFold(ModelConfig.preset("test")), features=TRAINED)
    return path


@pytest.mark.verify
def test_a_model_joins_several(
    workplace: Workplace, other_checkpoint: Path, third_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches models that are computed again when another one joins them, as after a run that ended between two models, and
    results that differ from all at once."""
    workplace.only("alpha_A")
    two = [workplace.config.checkpoint, other_checkpoint]
    folder = predict(workplace.change(checkpoint=two), silent)[0].folder
    (folder / "notes.txt").write_text("mine")
    (folder / "my_seed_0.cif").write_text("mine too")
    runs = runs_of_the_model(monkeypatch)
    every = workplace.change(checkpoint=[*two, third_checkpoint])
    predict(every, silent)
    assert len(runs) == 2
    at_once = predict(replace(every, output=workplace.root / "at_once"), silent)[0]
    assert names_in(folder) == names_in(at_once.folder) | {"notes.txt", "my_seed_0.cif"}
    for name in names_in(at_once.folder) - {"timings.json", "report.html"}:
        assert (folder / name).read_bytes() == (at_once.folder / name).read_bytes(), name
    runs.clear()
    assert all(result.kept for again in (every, workplace.change(checkpoint=two)) for result in predict(again, silent))
    assert not runs, "models that are there need not run"
    predict(workplace.change(checkpoint=two, seeds=3), silent)
    assert len(runs) == 2
    assert (folder / "tiny_seed_2.cif").is_file()
    runs.clear()
    predict(replace(every, overwrite=True), silent)
    assert len(runs) == 6
    assert names_in(folder) == names_in(at_once.folder) | {"notes.txt", "my_seed_0.cif"}


@pytest.mark.verify
def test_one_model_and_several_do_not_mix(workplace: Workplace, other_checkpoint: Path, finished: Finished) -> None:
    """Catches files without a model's name beside those of several models, in either order."""
    both = workplace.change(checkpoint=[workplace.config.checkpoint, other_checkpoint])
    before = workplace.snapshot()
    with pytest.raises(
        UserError, match=r"alpha_A: holds results of one model, and this run has several.*2 records can"
    ):
        predict(both, silent)
    assert workplace.snapshot() == before
    predict(replace(both, overwrite=True), silent)
    there = r"alpha_A: holds results of several models \(tiny, second\), and this run has one; .*--overwrite"
    with pytest.raises(UserError, match=there):
        predict(workplace.config, silent)


def test_results_that_are_replaced_are_no_other_models(
    workplace: Workplace, other_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches results of an earlier run that --overwrite leaves where the first model fails, as if the second had made them."""
    workplace.only("alpha_A")
    both = workplace.change(checkpoint=[workplace.config.checkpoint, other_checkpoint], seeds=1)
    folder = predict(replace(both, seeds=2), silent)[0].folder
    real, runs = seeds.run_passes, list[int]()

    def first_fails(*given: Any) -> Any:
        runs.append(1)
        if len(runs) == 1:
            raise MemoryError
        return real(*given)

    monkeypatch.setattr(seeds, "run_passes", first_fails)
    outcome = predict_records(replace(both, overwrite=True), silent)
    assert [failure.reason.partition(":")[0] for failure in outcome.failures] == ["tiny"]
    assert [list(result.mean_plddt) for result in outcome.results] == [["second_seed_0"]]
    assert not list(folder.glob("*_seed_1*"))
    assert not list(folder.glob("tiny_*"))


@pytest.mark.verify
def test_formats_are_added_for_all_models(workplace: Workplace, other_checkpoint: Path) -> None:
    """Catches a format that only the files of one model get."""
    workplace.only("beta_A")
    both = workplace.change(checkpoint=[workplace.config.checkpoint, other_checkpoint], seeds=1)
    folder = predict(both, silent)[0].folder
    predict(workplace.change(checkpoint=both.checkpoint, seeds=1, format="pdb"), silent)
    assert {"tiny_seed_0.pdb", "second_seed_0.pdb", "tiny_seed_0.cif"} <= names_in(folder)


@pytest.mark.verify
def test_results_of_a_model_that_is_not_given_stay_what_they_are(
    workplace: Workplace, other_checkpoint: Path, finished: Finished
) -> None:
    """Catches two models' results that are mixed because a checkpoint or an alignment has changed."""
    before = workplace.snapshot()
    with pytest.raises(UserError, match=r"checkpoint: .* there, .* now.*--overwrite"):
        predict(workplace.change(checkpoint=other_checkpoint), silent)
    assert workplace.snapshot() == before
    both = [workplace.config.checkpoint, other_checkpoint]
    predict(workplace.change(checkpoint=both, overwrite=True), silent)
    alignment = workplace.config.alignments / "alpha_A" / "uniref90_hits.a3m"
    alignment.write_text("\n".join(alignment.read_text().splitlines()[:-2]) + "\n")
    outcome = predict_records(workplace.change(checkpoint=both), silent)
    assert [result.name for result in outcome.results] == ["beta_A"]
    assert [failure.reason.partition(": ")[0] for failure in outcome.failures] == ["tiny", "second"]
    assert all("(alignments: " in failure.reason for failure in outcome.failures)


def test_a_record_that_fails_with_one_model_keeps_the_others(
    workplace: Workplace, other_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a failure that takes the other model's prediction along, or that does not say which model failed."""
    real, runs = seeds.run_passes, list[int]()

    def second_fails(*given: Any) -> Any:
        runs.append(1)
        if len(runs) == 3:
            raise MemoryError
        return real(*given)

    monkeypatch.setattr(seeds, "run_passes", second_fails)
    both = [workplace.config.checkpoint, other_checkpoint]
    outcome = predict_records(workplace.change(checkpoint=both, seeds=1), silent)
    assert [result.name for result in outcome.results] == ["alpha_A", "beta_A"]
    (failure,) = outcome.failures
    assert failure.reason.startswith("second: alpha_A: 22 residues do not fit")
    assert list(outcome.results[0].mean_plddt) == ["tiny_seed_0"]
    assert len(outcome.results[1].mean_plddt) == 2


def test_a_broken_checkpoint_is_found_before_the_first_model_runs(workplace: Workplace) -> None:
    """Catches hours of the first model before the second one turns out to be missing."""
    before = workplace.snapshot()
    with pytest.raises(UserError, match=r"absent\.ckpt: no such checkpoint"):
        predict(workplace.change(checkpoint=[workplace.config.checkpoint, workplace.root / "absent.ckpt"]), silent)
    assert workplace.snapshot() == before


def test_names_tell_models_apart(workplace: Workplace, other_checkpoint: Path) -> None:
    """Catches two models of one file name that overwrite each other, the same model twice, and a folder that is not read."""
    places = [workplace.root / "runs" / run / "checkpoints" / "best.ckpt" for run in ("a b", "c")]
    for place, source in zip(places, (workplace.config.checkpoint, other_checkpoint), strict=True):
        place.parent.mkdir(parents=True)
        shutil.copy(source, place)
    shutil.copy(places[0], places[0].with_name("last.ckpt"))
    (places[0].parent / "readme.txt").write_text("none")
    assert [model.name for model in find_models(places)] == ["a_b_best", "c_best"]
    assert [(model.name, model.path) for model in find_models([places[0].parent])] == [(None, places[0])]
    shutil.copy(places[1], places[0].with_name("step.ckpt"))
    assert [model.name for model in find_models([places[0].parent])] == ["best", "step"]
    with pytest.raises(UserError, match="is given as --checkpoint more than once"):
        find_models([places[0], places[0].parent])
    run = places[0].parent.parent
    with pytest.raises(
        UserError, match=rf"{run}: --checkpoint is a folder without a checkpoint .*; give {run}/checkpoints/best.ckpt$"
    ):
        find_models([run])
    places[0].unlink()
    with pytest.raises(UserError, match=rf"; give {run}/checkpoints$"):
        find_models([run])


def with_models(handle: Any, config: PredictConfig) -> list[list[Any]]:
    """The rankings, as a rank that is a group of its own knows them."""
    outcome = predict_records(config, silent, None, Groups(Group(handle), None))
    return [list(result.mean_plddt) for result in outcome.results]


@pytest.mark.verify
def test_groups_of_ranks_take_one_model_after_the_other(
    workplace: Workplace, other_checkpoint: Path, pool: RankPool
) -> None:
    """Catches groups that find the queue of the first model empty, and predict nothing with the second one."""
    config = workplace.change(checkpoint=[workplace.config.checkpoint, other_checkpoint], seeds=1)
    one, other = pool.run(2, with_models, config)
    assert one == other
    assert [sorted(keys) for keys in one] == [["second_seed_0", "tiny_seed_0"]] * 2


def test_the_option_is_given_once_for_each_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a --checkpoint that is lost, or that swallows the inputs behind it."""
    seen: list[PredictConfig] = []
    monkeypatch.setattr(command, "run", lambda config, words: seen.append(config) or 0)
    words = [
        "predict",
        "--checkpoint",
        "a.ckpt",
        "x.fasta",
        "--checkpoint=b c.ckpt",
        "y.fasta",
        "--output",
        str(tmp_path),
    ]
    assert main(words) == 0
    assert seen[0].checkpoint == [Path("a.ckpt"), Path("b c.ckpt")]
    assert list(seen[0].inputs) == [Path("x.fasta"), Path("y.fasta")]
    assert main(["predict", "x.fasta", "--checkpoint", "a.ckpt", "--output", str(tmp_path)]) == 0
    assert seen[1].checkpoint == Path("a.ckpt")


def test_a_folder_that_travels_predicts_as_its_checkpoint(workplace: Workplace, tmp_path: Path) -> None:
    """Catches weights or feature sizes that are lost on the way, and a folder taken for one of checkpoints."""
    assert isinstance(workplace.config.checkpoint, Path)
    evodsp.save_pretrained(evodsp.load_model(workplace.config.checkpoint), tmp_path / "model")
    pairs = []
    for place, given in enumerate((workplace.config.checkpoint, tmp_path / "model")):
        config = replace(workplace.config, checkpoint=given, output=tmp_path / str(place))
        (first, *_) = predict(config, silent)
        pairs.append((first.mean_plddt, first.structure().read_text().partition("_atom_site")[2]))
    assert pairs[0] == pairs[1]
