"""Several models predict the same records, and models by the names of published parameters: files, one ranking, sizes."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evodsp
from evodsp.cli import main
from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.inference import command, jobs, seeds
from evodsp.inference.config import EstimateConfig, PredictConfig
from evodsp.inference.groups import Groups
from evodsp.inference.jobs import feature_config, find_models
from evodsp.inference.predict import predict, predict_records
from evodsp.model.alphafold import AlphaFold
from evodsp.parallel.group import Group
from evodsp.weights.by_name import models_of
from evodsp.weights.checkpoint import save_model
from evodsp.weights.command import randomise
from evodsp.weights.config import published_features
from evodsp.weights.deepmind import read_npz
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


@pytest.fixture
def small_workplace(workplace: Workplace) -> Workplace:
    """A target and a seed are as good as several."""
    workplace.only("alpha_A")
    return Workplace(workplace.root, workplace.change(seeds=1))


@pytest.fixture
def parameters(tmp_path: Path) -> Path:
    """Random parameters of the tiny model under DeepMind's names."""
    path = tmp_path / "params.npz"
    assert main(["weights", "random", "--preset", "test", "--seed", "5", "--output", str(path)]) == 0
    return path


def test_a_parameter_file_predicts_as_its_checkpoint(small_workplace, parameters, tmp_path):
    """Catches a parameter file that predicts other bytes than the checkpoint that `evodsp weights import` makes of it."""
    words = ["weights", "import", "--checkpoint", str(parameters), "--preset", "test"]
    assert main([*words, "--output", str(tmp_path / "imported.ckpt")]) == 0
    imported = small_workplace.change(checkpoint=tmp_path / "imported.ckpt", output=tmp_path / "imported")
    direct = small_workplace.change(checkpoint=parameters, preset="test")
    for a, b in zip(predict(direct, silent), predict(imported, silent), strict=True):
        one, other = ((result.folder / "seed_0.cif").read_text().splitlines() for result in (a, b))
        differing = [line for line, same in zip(one, other, strict=True) if line != same]
        assert [line.split()[3] for line in differing] == ["checkpoint"], "the fingerprint of the file"
        assert (a.folder / "seed_0_scores.json").read_bytes() == (b.folder / "seed_0_scores.json").read_bytes()


def test_parameters_by_name_are_fetched_and_kept(small_workplace, parameters, tmp_path, capfd):
    """Catches --weights that predicts with another file, fetches although the inputs are wrong, or fetches again."""
    shutil.copy(parameters, tmp_path / "params_model_1.npz")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    asked = []
    given = {"checkpoint": None, "weights": "model_1", "preset": "test", "weights_folder": tmp_path / "kept"}
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        config = small_workplace.change(**given, weights_url=f"http://127.0.0.1:{server.server_port}")
        try:
            with pytest.raises(UserError, match="no such file"):
                predict(replace(config, fasta=tmp_path / "none.fasta"), silent)
            assert not asked
            named = predict(replace(config, output=tmp_path / "named"), silent)
        finally:
            server.shutdown()
            thread.join()
    assert "params_model_1.npz" in capfd.readouterr().err
    assert (tmp_path / "kept" / "params_model_1.npz").read_bytes() == parameters.read_bytes()
    direct = predict(small_workplace.change(checkpoint=parameters, preset="test"), silent)
    for a, b in zip(named, direct, strict=True):
        assert (a.folder / "seed_0_scores.json").read_bytes() == (b.folder / "seed_0_scores.json").read_bytes()
    predict(replace(config, output=tmp_path / "again"), silent)  # the server is gone


@pytest.mark.verify
def test_all_five_models_by_one_name(small_workplace, tmp_path):
    """Catches a model that is left out or of another kind, and predictions that are not ranked together."""
    for number in range(1, 6):
        path = tmp_path / "kept" / f"params_model_{number}_ptm.npz"
        path.parent.mkdir(exist_ok=True)
        assert main(["weights", "random", "--preset", "test", "--seed", str(number), "--output", str(path)]) == 0
    config = small_workplace.change(checkpoint=None, weights="all_ptm", preset="test", weights_folder=tmp_path / "kept")
    (result,) = predict(config, silent)
    entries = read_json(result.folder / "ranking.json")["ranking"]
    assert {entry["model"] for entry in entries} == {f"params_model_{number}_ptm" for number in range(1, 6)}
    plddt = [entry["mean_plddt"] for entry in entries]
    assert plddt == sorted(plddt, reverse=True)
    with pytest.raises(UserError, match=r"'all_pmt'.*all_ptm"):
        replace(config, weights="all_pmt")


def test_names_of_all_models_of_a_kind():
    """Catches a kind that has no name, a model that is predicted twice, and 'Did you mean' the very name that was given."""
    numbers = range(1, 6)
    assert models_of(["model_3", "all_monomer"]) == ["model_3", *(f"model_{n}" for n in numbers if n != 3)]
    assert models_of(["all_ptm"]) == [f"model_{n}_ptm" for n in numbers]
    assert models_of(["all_multimer_v3"]) == [f"model_{n}_multimer_v3" for n in numbers]
    with pytest.raises(UserError, match="all_ptm is five models, but one is wanted here; name it, such as model_1_ptm"):
        EstimateConfig(residues=10, weights="all_ptm")


def test_published_sizes_are_the_default(small_workplace, tmp_path, monkeypatch):
    """Catches other sizes than model_2_ptm's (512 clusters, 1024 extra rows, 4 templates), and ignored flags.

    The model is not run.
    """
    seen = []

    def stop(model, run, features, *_):
        seen.append(features)
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "_jobs", stop)
    path = tmp_path / "params_model_2_ptm.npz"
    np.savez(path, weights=np.zeros(1, np.float32))
    for change in ({}, {"extra_msa": 64, "recycles": 1}):
        config = small_workplace.change(
            checkpoint=path, **{"msa_clusters": None, "extra_msa": None, "recycles": None, **change}
        )
        with pytest.raises(KeyboardInterrupt):
            predict(config, silent)
        assert seen[-1] == feature_config(config.sizes, published_features("model_2_ptm"))
    assert [(f.msa_clusters, f.extra_msa, f.max_templates, f.recycles) for f in seen] == [
        (512, 1024, 4, 3),
        (512, 64, 4, 1),
    ]


def test_random_parameters_are_of_their_seed(parameters, tmp_path):
    """Catches random parameters that are not repeatable, and arrays that stay zero."""
    for name, seed in (("again.npz", "5"), ("other.npz", "6")):
        assert main(["weights", "random", "--preset", "test", "--seed", seed, "--output", str(tmp_path / name)]) == 0
    first, again, other = (read_npz(path) for path in (parameters, tmp_path / "again.npz", tmp_path / "other.npz"))
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert not any(np.array_equal(first[key], other[key]) for key in first)
    assert all((values != 0).all() for values in first.values())


def test_random_parameters_keep_activations_sane(small_workplace, parameters):
    """Catches random parameters with which deep stacks overflow to NaN."""
    result = predict(small_workplace.change(checkpoint=parameters, preset="test"), silent)[0]
    ranking = json.loads((result.folder / "ranking.json").read_text())["ranking"]
    assert all(20 < entry["mean_plddt"] < 80 for entry in ranking)
    model = AlphaFold(ModelConfig.preset("small"))
    randomise(model, 0)
    m, z = torch.randn(1, 4, 9, 64), torch.randn(1, 9, 9, 32)
    with torch.no_grad():
        for _ in range(24):  # 24 passes through 2 blocks: as deep as the full model
            m, z = model.evoformer(m, z, torch.ones(1, 4, 9), torch.ones(1, 9, 9))
    assert 1 < m.std() < 50
    assert 1 < z.std() < 50
