"""Models as folders that travel, also through the hub: bitwise back, with a card; what is damaged or hostile is one line."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import evodsp
from evodsp.cli import main
from evodsp.config import FeatureConfig, ModelConfig, as_multimer
from evodsp.errors import UserError
from evodsp.inference.jobs import find_models
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import load_features, load_model, save_model
from evodsp.weights.initial import initialise
from evodsp.weights.pretrained import model_card
from tests.builders.weights import SMALL, random_model, same

FEATURES = FeatureConfig(crop_size=None, msa_clusters=7, extra_msa=5, max_templates=2, recycles=1)
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model."""
    model = random_model(ModelConfig.preset("test"), 0)
    model.trained_features = FEATURES
    evodsp.save_pretrained(model, made := tmp_path_factory.mktemp("pretrained") / "model")
    return made


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def with_config(folder: Path, **values: Any) -> Path:
    """The folder with entries of config.json replaced, or removed where the value is None."""
    config = {**json.loads((folder / CONFIG).read_text()), **values}
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def with_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """The folder with other weights, and without their sum."""
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    return with_config(folder, sha256=None)


@pytest.mark.parametrize("config", [SMALL, as_multimer(SMALL)], ids=["monomer", "multimer"])
def test_a_model_comes_back_bit_by_bit(config: ModelConfig, tmp_path: Path) -> None:
    """Catches a weight, a size or a feature size that is lost, in both arrangements, and files that others cannot read."""
    model = random_model(config, 1)
    model.trained_features = FEATURES
    evodsp.save_pretrained(model, tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {WEIGHTS, CONFIG, CARD}
    assert len({path.stat().st_mode for path in (tmp_path / "model").iterdir()}) == 1
    for load in (evodsp.from_pretrained, load_model):
        again = load(tmp_path / "model")
        assert same(again, model)
        assert (again.config, again.trained_features, again.training) == (config, FEATURES, False)
    evodsp.save_pretrained(again, tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "model" / WEIGHTS).read_bytes()


@pytest.mark.verify
def test_the_commands_convert_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches raw weights exported in place of their average, and a folder that the commands do not take."""
    model = random_model(ModelConfig.preset("test"), 2)
    save_model(
        file := tmp_path / "x.ckpt", model, {name: value + 1 for name, value in model.named_parameters()}, FEATURES
    )
    export = ["weights", "export", "--checkpoint", str(file), "--format", "safetensors", "--output"]
    assert main([*export, str(tmp_path / "average")]) == 0
    assert main([*export, str(tmp_path / "raw"), "--raw"]) == 0
    assert "safetensors, " in capsys.readouterr().err
    assert same(load_model(tmp_path / "raw"), model)
    assert same(load_model(tmp_path / "average"), load_model(file))
    params = tmp_path / "params.npz"
    assert main(["weights", "export", "--checkpoint", str(tmp_path / "raw"), "--output", str(params)]) == 0
    words = ["weights", "import", "--checkpoint", str(params), "--like", str(tmp_path / "raw"), "--output"]
    assert main([*words, str(tmp_path / "back.ckpt")]) == 0
    assert same(load_model(tmp_path / "back.ckpt"), model)
    assert load_features(tmp_path / "back.ckpt") == FEATURES


def test_mistakes_of_the_commands_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a model that is replaced unasked, and an option that is accepted but ignored."""
    (taken := tmp_path / "file").write_text("precious")
    before = (folder / WEIGHTS).read_bytes()
    export = ["export", "--checkpoint", str(folder), "--format", "safetensors"]
    for words, expected in (
        ([*export, "--output", str(folder)], f"{CONFIG}: exists already"),
        ([*export, "--output", str(taken)], "is a file, but a model of safetensors is a folder"),
        ([*export, "--output", str(tmp_path / "new"), "--fused"], "--fused is given with --format safetensors"),
        ([*export, "--output", str(tmp_path / "new.safetensors")], "writes a folder; name it without the suffix"),
        (["import", "--checkpoint", str(folder), "--output", str(tmp_path / "n.ckpt")], "is already a model of evodsp"),
        (["export", "--checkpoint", str(folder / WEIGHTS), "--output", str(tmp_path / "n.npz")], "give the folder: "),
    ):
        assert main(["weights", *words]) == 2, words
        error = capsys.readouterr().err
        assert expected in error or (expected.startswith(CONFIG) and "exists already" in error), error
        assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (folder / WEIGHTS).read_bytes() == before


def test_overwriting_leaves_other_files(copy: Path) -> None:
    """Catches a repository's own files deleted, and a model of which old and new files are mixed."""
    (copy / ".gitattributes").write_text("*.safetensors filter=lfs")
    model = random_model(SMALL, 4)
    evodsp.save_pretrained(model, copy, overwrite=True)
    assert {path.name for path in copy.iterdir()} == {WEIGHTS, CONFIG, CARD, ".gitattributes"}
    assert same(load_model(copy), model)


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    """Catches a broken model that is published."""
    model = random_model(ModelConfig.preset("test"), 0)
    with torch.no_grad():
        next(model.parameters()).view(-1)[3] = torch.inf
    with pytest.raises(UserError, match=r"model: 'input_embedder.* holds numbers that are not finite"):
        evodsp.save_pretrained(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def _larger(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())["model_config"]
    with_config(folder, model_config={**config, "channels": {**config["channels"], "pair": 1 << 20}})


def _header(length: int) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + b"{}")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000]),
        "model.safetensors: not a readable safetensors file",
    ),
    "a header of any size": (_header(1 << 40), "not a readable safetensors file"),
    "a pickle": (lambda folder: torch.save({"a": torch.zeros(3)}, folder / WEIGHTS), "not a readable safetensors file"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "but no file model.safetensors; copy the folder again"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), "has model.safetensors and README.md, but no file config"),
    "another program's": (
        lambda folder: (folder / CONFIG).write_text('{"model_type": "bert", "architectures": ["BertModel"]}'),
        "config.json: model_type is 'bert', but must be 'evodsp': this is another program's model",
    ),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "config.json:1: not JSON"),
    "large JSON": (lambda folder: (folder / CONFIG).write_text(" " * (2 << 20)), "config.json: larger than 1 MiB"),
    "an unknown key": (
        lambda folder: with_config(folder, feature={}),
        "unknown key 'feature'. Did you mean 'features'?",
    ),
    "no sizes": (lambda folder: with_config(folder, model_config=None), "it lacks model_config"),
    "from the future": (
        lambda folder: with_config(folder, format_version=9, evodsp_version="7.0", new_part={}),
        "config.json: written by evodsp '7.0' in format version 9, but this evodsp",
    ),
    "other sizes": (_larger, "has the shape"),
    "a strange sum": (lambda folder: with_config(folder, sha256=[1]), "damaged, or not the weights of config.json"),
    "an unknown array": (
        lambda folder: with_weights(folder, lambda w: {**w, "x": torch.zeros(1)}),
        "the model has no parameter for array 'x'",
    ),
    "not finite": (
        lambda folder: with_weights(folder, lambda w: {name: value * torch.nan for name, value in w.items()}),
        "holds numbers that are not finite",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_line_before_a_model_is_built(name: str, copy: Path, no_models: None) -> None:
    """Catches a traceback, memory that a few bytes ask for, weights of another model, and a key that is ignored."""
    change, expected = BAD[name]
    change(copy)
    with pytest.raises(UserError) as caught:
        evodsp.from_pretrained(copy)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(str(copy))
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_is_found(copy: Path) -> None:
    """Catches predictions with weights that a disk or a copy has damaged."""
    data = bytearray((copy / WEIGHTS).read_bytes())
    data[-5] ^= 4
    (copy / WEIGHTS).write_bytes(data)
    with pytest.raises(UserError, match="damaged, or not the weights"):
        load_model(copy)


def test_other_sizes_of_features_are_another_model(copy: Path, folder: Path) -> None:
    """Catches earlier predictions that are kept although config.json says that the model is used in another way."""
    features = json.loads((copy / CONFIG).read_text())["features"]
    with_config(copy, features={**features, "recycles": 3})
    first, second = find_models([folder, copy])
    assert first.digest != second.digest
    assert (first.name, second.name) == ("model", "copy")
    with_config(copy, features=features)
    (copy / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    assert len(find_models([folder, copy])) == 1


def test_a_run_begins_with_a_folder(folder: Path, copy: Path) -> None:
    """Catches weights that do not arrive, and damaged ones that are trained on."""
    model = AlphaFold(ModelConfig.preset("test"))
    done = initialise(model, folder)
    assert (done.taken, done.new, done.left_out) == (done.of, (), ())
    assert same(model, load_model(folder))
    with_config(copy, sha256="0" * 64)
    with pytest.raises(UserError, match="damaged, or not the weights"):
        initialise(model, copy)


def test_a_run_cannot_go_on_from_weights_alone(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches Lightning's traceback for a folder without an optimizer's state."""
    words = ["fit", "--config", "quickstart", "--output", str(tmp_path / "run"), f"--ckpt_path={copy}"]
    assert main(words) == 2
    assert f"holds weights, but not the state of a run, which --ckpt_path resumes; begin with --init_from {copy}" in (
        capsys.readouterr().err
    )


@pytest.mark.verify
def test_estimate_takes_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command that does not know folders, or estimates with other sizes than the folder's."""
    assert main(["estimate", "--residues", "16", "--checkpoint", str(folder)]) == 0
    assert "2 passes a seed, 7 MSA rows, 5 extra ones" in capsys.readouterr().out


Asked = dict[str, Any]
FETCHED = ["model.safetensors", "config.json", "README.md"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., str]], None]:
    """Puts a function in the place of huggingface_hub's."""

    def play(snapshot_download: Callable[..., str]) -> None:
        module = ModuleType("huggingface_hub")
        module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)

    return play


@pytest.fixture
def asked(hub: Callable[[Callable[..., str]], None], folder: Path) -> list[Asked]:
    """A hub of one model, organisation/name; the list is what it has been asked for."""
    seen: list[Asked] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        seen.append({"repo_id": repo_id, **options})
        return str(folder)

    hub(snapshot_download)
    return seen


def test_only_the_three_files_of_the_revision_are_fetched(asked: list[Asked], folder: Path) -> None:
    """Catches a revision that is lost, and other files of a stranger's repository that are fetched."""
    model = load_model(folder)
    for revision in (None, "v1.0"):
        assert same(evodsp.from_pretrained("organisation/name", revision=revision), model)
        assert asked.pop() == {"repo_id": "organisation/name", "revision": revision, "allow_patterns": FETCHED}
    for name, revision in {
        "hf:organisation/name": None,
        "hf://organisation/name@refs/pr/3": "refs/pr/3",
        Path("hf://organisation/name@abc"): "abc",
    }.items():
        assert same(load_model(name), model)
        assert asked.pop() == {"repo_id": "organisation/name", "revision": revision, "allow_patterns": FETCHED}


def test_checkpoints_are_named_by_the_hub(asked: list[Asked], folder: Path) -> None:
    """Catches options that do not know the hub, and a model that is called by a folder of the cache."""
    found = find_models([Path("hf:organisation/name@v1")])
    assert [one.path for one in found] == [folder]
    model = random_model(ModelConfig.preset("test"), 1)
    initialise(model, "hf:organisation/name@v2")
    assert same(model, load_model(folder))
    assert {one["revision"] for one in asked} == {"v1", "v2"}


def test_a_folder_of_this_machine_comes_first(
    asked: list[Asked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a question to the hub for a model that lies here."""
    monkeypatch.chdir(tmp_path)
    model = random_model(ModelConfig.preset("test"), 2)
    evodsp.save_pretrained(model, "organisation/name")
    assert same(evodsp.from_pretrained("organisation/name"), model)
    assert asked == []
    with pytest.raises(UserError, match="a folder of this machine has no revision 'v1'"):
        evodsp.from_pretrained("organisation/name", revision="v1")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf:name", "not the name of a model on the hub; write hf:organisation/name"),
        ("hf:a/b/c", "not the name of a model on the hub"),
        ("hf:../b", "not the name of a model on the hub"),
        ("name", "no such folder; give a folder of model.safetensors and config.json, or organisation/name"),
        ("runs/x/checkpoints/best.ckpt", "no such folder"),
    ],
)
def test_what_is_no_name_is_not_asked_for(source: str, expected: str, asked: list[Asked]) -> None:
    """Catches a mistyped path that goes to the network."""
    with pytest.raises(UserError, match=expected) as caught:
        evodsp.from_pretrained(source)
    assert str(caught.value).startswith(source)
    assert asked == []


def test_what_the_hub_refuses_is_one_line(hub: Callable[[Callable[..., str]], None]) -> None:
    """Catches a traceback of huggingface_hub."""

    def refuse(*_: Any, **__: Any) -> str:
        raise OSError("401 Client Error.\n\nRepository Not Found")

    hub(refuse)
    with pytest.raises(
        UserError, match=r"hf:a/b@v1: cannot be had from the hub \(401 Client Error. Repository Not"
    ) as caught:
        load_model("hf:a/b@v1")
    assert "\n" not in str(caught.value)


def test_without_huggingface_hub_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback where the extra is not installed."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"which is not installed; pip install 'evodsp\[hub\]', or give a folder"):
        evodsp.from_pretrained("organisation/name")


RUN_CONFIG = """
init_from: /home/someone/secret/first.ckpt
data:
  train_chains: /home/someone/secret/train.txt
  validation_chains: [1abc_A, 2abc_B]
  alignment_dir: ../other/alignments
  store: null
  exclude_like: /home/someone/validation.txt
  exclude_identity: 0.3
model:
  ema_decay: 0.99
  loss: {backbone_fape: 2.0, violation: 0.0}
  optimizer: {lr: 0.002, schedule: "cosine | <b>"}
"""
CURVE = """step,epoch,seconds,train/loss,val/lddt_ca,val/lddt_ca/1abc_A,val/rmsd
9,0,1.0,5.0,,,
19,0,2.0,4.0,0.61234567,0.5,2.5
39,0,3,3.0,0.8,0.7,2.0
"""
BASELINE = '{"lddt_ca": 0.5, "validation_chains": 2, "copies": []}'


@pytest.fixture(scope="module")
def small_model() -> AlphaFold:
    return random_model(ModelConfig.preset("test"), 0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    for name, text in {"config.yaml": RUN_CONFIG, "curve.csv": CURVE, "baseline.json": BASELINE}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_data_recipe_and_scores_are_those_of_the_run(small_model: AlphaFold, run: Path) -> None:
    """Catches scores of another step, a setting that is lost, and a path of the machine that is published."""
    checkpoint = {"global_step": 30, "samples_per_step": 8, "ema_state_dict": {}}
    card = model_card("a name", small_model, run / "checkpoints" / "best.ckpt", checkpoint)
    rows = dict(line.strip("| ").split(" | ", 1) for line in card.splitlines() if line.startswith("| "))
    assert rows["data.train_chains"] == "train.txt"
    assert rows["data.alignment_dir"] == "alignments"
    assert rows["data.validation_chains"] == r"\['1abc_A', '2abc_B'\]"
    assert (rows["data.exclude_like"], rows["data.exclude_identity"]) == ("validation.txt", "0.3")
    (run / "config.yaml").write_text(RUN_CONFIG.replace("/home/someone/validation.txt", "null"))
    assert "exclude" not in model_card("a", small_model, run / "checkpoints" / "best.ckpt", checkpoint)
    assert rows["init_from"] == "first.ckpt"
    assert rows["model.optimizer.schedule"] == r"cosine \| \<b\>"
    assert rows["model.loss.backbone_fape"] == "2.0"
    assert not {"data.store", "model.loss.violation"} & rows.keys()
    assert (rows["lDDT-CA (0 to 1)"], rows["RMSD of CA (Å)"]) == ("0.6123", "2.5")
    assert "someone" not in card
    assert "after 30 steps of 8 samples each" in card
    assert "after 20 steps" in card
    assert "copying the nearest training chain (0 of 2 chains) scores an lDDT-CA of 0.500" in card
    assert "# a name" in card
    assert "best.ckpt: the moving average of the weights." in card


def test_a_card_names_the_limit_that_ended_the_run(small_model: AlphaFold, run: Path) -> None:
    """Catches ten million samples, the default of the other limit, beside 40 steps; and a limit left out that came first."""
    for steps, row in (40, "| trainer.max_steps | 40 |"), (-1, "| max_samples | 10000000 |"):
        (run / "config.yaml").write_text(f"max_samples: 10000000\ntrainer: {{max_steps: {steps}}}\n")
        card = model_card("a", small_model, run / "checkpoints" / "best.ckpt", {})
        assert row in card
        assert card.count("max_") - card.count("max_steps | -1") == 1
    (run / "config.yaml").write_text("max_samples: 100\ntrainer: {max_steps: 40}\n")
    counts = {"global_step": 13, "samples_per_step": 8}
    assert "| max_samples | 100 |" in model_card("a", small_model, run / "checkpoints" / "best.ckpt", counts)


def test_raw_weights_are_not_given_the_scores_of_the_average(small_model: AlphaFold, run: Path) -> None:
    """Catches a card that praises weights for the scores of others."""
    card = model_card(
        "a", small_model, run / "checkpoints" / "best.ckpt", {"global_step": 30, "ema_state_dict": {}}, raw=True
    )
    assert "best.ckpt: the raw weights." in card
    assert "scores of the moving average, not of these raw weights" in card


def test_a_checkpoint_before_the_first_validation_has_no_scores(small_model: AlphaFold, run: Path) -> None:
    """Catches scores of later weights."""
    card = model_card("a", small_model, run / "checkpoints" / "last.ckpt", {"global_step": 10})
    assert "no validation scores up to these weights" in card


def test_without_a_run_the_card_says_so(small_model: AlphaFold, run: Path, tmp_path: Path) -> None:
    """Catches a card with the data of a folder that happens to be near, and published parameters without their licence."""
    assert "says nothing of them" in model_card("a", small_model, run / "elsewhere.ckpt", {})
    assert "CC BY 4.0" in model_card("a", small_model, Path("params_model_1_ptm.npz"))
    evodsp.save_pretrained(small_model, tmp_path / "made", checkpoint=None)
    text = (tmp_path / "made" / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: evodsp\n")
    assert "# made" in text
