"""Models of the Hugging Face hub, which is played by a function: what is asked of it, and what is said when it fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import evodsp
from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.inference.jobs import find_models
from evodsp.weights.checkpoint import load_model
from evodsp.weights.initial import initialise
from tests.builders.weights import random_model, same

Asked = dict[str, Any]
FILES = ["model.safetensors", "config.json", "README.md"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., str]], None]:
    """Puts a function in the place of huggingface_hub's."""

    def play(snapshot_download: Callable[..., str]) -> None:
        module = ModuleType("huggingface_hub")
        module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)

    return play


@pytest.fixture
def asked(hub: Callable[[Callable[..., str]], None], tmp_path: Path) -> list[Asked]:
    """A hub of one model, organisation/name; the list is what it has been asked for."""
    evodsp.save_pretrained(random_model(ModelConfig.preset("test"), 0), tmp_path / "cache" / "name")
    seen: list[Asked] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        seen.append({"repo_id": repo_id, **options})
        return str(tmp_path / "cache" / "name")

    hub(snapshot_download)
    return seen


def test_only_the_three_files_of_the_revision_are_fetched(asked: list[Asked], tmp_path: Path) -> None:
    """Catches a revision that is lost, and other files of a stranger's repository that are fetched."""
    model = load_model(tmp_path / "cache" / "name")
    for revision in (None, "v1.0"):
        assert same(evodsp.from_pretrained("organisation/name", revision=revision), model)
        assert asked.pop() == {"repo_id": "organisation/name", "revision": revision, "allow_patterns": FILES}
    for name, revision in {
        "hf:organisation/name": None,
        "hf:organisation/name@v1.0": "v1.0",
        "hf://organisation/name@refs/pr/3": "refs/pr/3",
        Path("hf://organisation/name@abc"): "abc",
    }.items():
        for load in (load_model, evodsp.from_pretrained):
            assert same(load(name), model)
            assert asked.pop() == {"repo_id": "organisation/name", "revision": revision, "allow_patterns": FILES}


def test_checkpoints_are_named_by_the_hub(asked: list[Asked], tmp_path: Path) -> None:
    """Catches options that do not know the hub, and a model that is called by a folder of the cache."""
    found = find_models([Path("hf:organisation/name@v1")])
    assert [one.path for one in found] == [tmp_path / "cache" / "name"]
    model = random_model(ModelConfig.preset("test"), 1)
    initialise(model, "hf:organisation/name@v2")
    assert same(model, load_model(tmp_path / "cache" / "name"))
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
