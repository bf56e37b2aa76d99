"""Prediction directly from a published parameter file: sizes, and random parameters for timings."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from evodsp.cli import main
from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.inference import jobs
from evodsp.inference.config import EstimateConfig
from evodsp.inference.jobs import feature_config
from evodsp.inference.predict import predict
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.by_name import models_of
from evodsp.weights.command import randomise
from evodsp.weights.config import published_features
from evodsp.weights.deepmind import read_npz
from tests.builders.prediction import read_json, silent

from .conftest import Workplace


@pytest.fixture
def workplace(workplace: Workplace) -> Workplace:
    """A target and a seed are as good as several."""
    workplace.only("alpha_A")
    return Workplace(workplace.root, workplace.change(seeds=1))


@pytest.fixture
def parameters(tmp_path: Path) -> Path:
    """Random parameters of the tiny model under DeepMind's names."""
    path = tmp_path / "params.npz"
    assert main(["weights", "random", "--preset", "test", "--seed", "5", "--output", str(path)]) == 0
    return path


def test_a_parameter_file_predicts_as_its_checkpoint(workplace, parameters, tmp_path):
    """Catches a parameter file that predicts other bytes than the checkpoint that `evodsp weights import` makes of it."""
    words = ["weights", "import", "--checkpoint", str(parameters), "--preset", "test"]
    assert main([*words, "--output", str(tmp_path / "imported.ckpt")]) == 0
    imported = workplace.change(checkpoint=tmp_path / "imported.ckpt", output=tmp_path / "imported")
    direct = workplace.change(checkpoint=parameters, preset="test")
    for a, b in zip(predict(direct, silent), predict(imported, silent), strict=True):
        one, other = ((result.folder / "seed_0.cif").read_text().splitlines() for result in (a, b))
        differing = [line for line, same in zip(one, other, strict=True) if line != same]
        assert [line.split()[3] for line in differing] == ["checkpoint"], "the fingerprint of the file"
        assert (a.folder / "seed_0_scores.json").read_bytes() == (b.folder / "seed_0_scores.json").read_bytes()


def test_parameters_by_name_are_fetched_and_kept(workplace, parameters, tmp_path, capfd):
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
        config = workplace.change(**given, weights_url=f"http://127.0.0.1:{server.server_port}")
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
    direct = predict(workplace.change(checkpoint=parameters, preset="test"), silent)
    for a, b in zip(named, direct, strict=True):
        assert (a.folder / "seed_0_scores.json").read_bytes() == (b.folder / "seed_0_scores.json").read_bytes()
    predict(replace(config, output=tmp_path / "again"), silent)  # the server is gone


@pytest.mark.verify
def test_all_five_models_by_one_name(workplace, tmp_path):
    """Catches a model that is left out or of another kind, and predictions that are not ranked together."""
    for number in range(1, 6):
        path = tmp_path / "kept" / f"params_model_{number}_ptm.npz"
        path.parent.mkdir(exist_ok=True)
        assert main(["weights", "random", "--preset", "test", "--seed", str(number), "--output", str(path)]) == 0
    config = workplace.change(checkpoint=None, weights="all_ptm", preset="test", weights_folder=tmp_path / "kept")
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


def test_published_sizes_are_the_default(workplace, tmp_path, monkeypatch):
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
        config = workplace.change(
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


def test_random_parameters_keep_activations_sane(workplace, parameters):
    """Catches random parameters with which deep stacks overflow to NaN."""
    result = predict(workplace.change(checkpoint=parameters, preset="test"), silent)[0]
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


def test_a_preset_that_does_not_exist(capsys):
    """Catches a traceback for an unknown preset."""
    assert main(["weights", "random", "--preset", "model_9", "--output", "nowhere.npz"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--preset is 'model_9', but must be one of" in error
