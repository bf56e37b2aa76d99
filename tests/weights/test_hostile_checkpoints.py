"""Checkpoints that were made to harm whoever reads them: each is one line, at once, before a model takes memory."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.training.run_folder import damage
from evodsp.weights import checkpoint as own
from evodsp.weights import published
from evodsp.weights.checkpoint import load_features, load_model, save_model
from evodsp.weights.deepmind import export_deepmind, write_npz
from evodsp.weights.openfold import export_openfold, read_openfold, write_openfold
from evodsp.weights.published import is_parameter_file, load_published
from evodsp.weights.untrusted import load_checked

CONFIG = ModelConfig.preset("test")
PLACE = 0x7654321
DEEP = b")" + b"\x85" * 1000
SHARED = b")" + b"".join(b"q%ch%c\x86" % (number + 100, number + 100) for number in range(22))


@pytest.fixture(scope="module")
def model() -> AlphaFold:
    torch.manual_seed(0)
    return AlphaFold(CONFIG)


def with_pickle(path: Path, content: Any, change: Callable[[bytes], bytes]) -> Path:
    """A file of `torch.save` whose pickle is changed."""
    file = io.BytesIO()
    torch.save(content, file)
    with zipfile.ZipFile(file) as archive:
        records = {entry.filename.partition("/")[2]: archive.read(entry) for entry in archive.infolist()}
    changed = change(records["data.pkl"])
    assert changed != records["data.pkl"]
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, data in {**records, "data.pkl": changed}.items():
        if name not in ("byteorder", "version", ".data/serialization_id"):
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return path


def replaced(part: bytes) -> Callable[[bytes], bytes]:
    """Puts the pickle `part` in the place of the number `PLACE`."""
    return lambda data: data.replace(b"J" + struct.pack("<i", PLACE), part)


def checkpoint_of(model: AlphaFold, **values: Any) -> dict[str, Any]:
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    return {"format_version": 2, "model_config": model.config.to_dict(), "state_dict": weights, **values}


HOSTILE = {
    "a deep key": ({PLACE: 1}, DEEP, "a tuple with a tuple as a key"),
    "a key that shares its parts": ({PLACE: 1}, SHARED, "a tuple with a tuple as a key"),
    "a deep value": ({"x": PLACE}, DEEP, "nested more than 200 deep"),
    "a value that shares its parts": ({"x": PLACE}, SHARED, "more than 2097152 parts"),
    "a set of a deep tuple": ({"x": PLACE}, b"cbuiltins\nset\n]" + DEEP + b"a\x85R", "nested more than 200 deep"),
    "memory": (
        {"x": PLACE},
        b"cbuiltins\nbytearray\n" + b"J\xff\xff\xff\x7f\x85R",
        "calls 'builtins.bytearray' with a size",
    ),
    "an array of any size": ({"x": PLACE}, b"ctorch\nFloatTensor\n" + b"J\xff\xff\xff\x7f\x85R", "Tensor' with a size"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_harm_the_reader_is_refused(name: str, model: AlphaFold, tmp_path: Path) -> None:
    """Catches the hash of a deep tuple, which ends the process, one that never ends, and memory that a few bytes ask for."""
    content, part, message = HOSTILE[name]
    path = with_pickle(tmp_path / "x.ckpt", checkpoint_of(model, callbacks=content), replaced(part))
    for read in (load_model, load_features, read_openfold, damage):
        with pytest.raises(UserError, match=f"x.ckpt: not a readable checkpoint: it .*{re.escape(message)}") as error:
            read(path)
        assert "\n" not in str(error.value)
    assert not is_parameter_file(path)


class Runs:
    """What its pickle says to call."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_torch_is_not_told_to_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a checkpoint that runs a command where the variable is set by which torch trusts whatever it loads."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"state_dict": Runs(tmp_path / "ran")}, tmp_path / "x.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        load_checked(tmp_path / "x.ckpt")
    assert not (tmp_path / "ran").exists()


def test_keys_that_programs_use_are_read(model: AlphaFold, tmp_path: Path) -> None:
    """Catches numbers, None, classes and short tuples refused as keys: optimizers and callbacks store them."""
    torch.save(
        checkpoint_of(model, callbacks={1: 0, None: 0, 0.5: 0, torch.Size: 0, ("a", 1): 0}),
        tmp_path / "x.ckpt",
    )
    assert load_model(tmp_path / "x.ckpt").config == model.config
    assert damage(tmp_path / "x.ckpt") is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"state_dict": {1: 2}}, "its state_dict is not a dictionary of arrays by name"),
        ({"state_dict": [1]}, "its state_dict is not a dictionary of arrays by name"),
        ({"ema_state_dict": {("a",): 1}}, "its ema_state_dict is not a dictionary of arrays by name"),
        ({"state_dict": {"model.x": 1}}, "'model.x' is not an array of floats"),
        ({"state_dict": {"model.x": torch.empty(9, device="meta")}}, "'model.x' is not an array of floats"),
        ({"state_dict": {"model.x": torch.eye(9).to_sparse()}}, "'model.x' is not an array of floats"),
        ({"state_dict": {"model.x": torch.zeros(1).expand(1 << 40)}}, "its arrays claim to be larger than the file"),
        ({"format_version": "9" * 5000}, r"format version '9{20,30}\.\.\.9{20,30}', but"),
        ({"model_config": {1: 2}}, "unreadable model sizes"),
        ({"model_config": {"channels": {"msa": "many"}}}, "unreadable model sizes"),
        ({"features": {1: 2}}, "unreadable feature sizes"),
    ],
)
def test_entries_of_other_types(
    values: dict[str, Any], message: str, model: AlphaFold, tmp_path: Path, no_models: None
) -> None:
    """Catches the AttributeError of a number among the names, and arrays that are numbers of nothing."""
    torch.save(checkpoint_of(model, **values), tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=message) as error:
        load_features(tmp_path / "x.ckpt") if "features" in values else load_model(tmp_path / "x.ckpt")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("stack", "change", "message"),
    [
        ("evoformer", {"blocks": 10**9}, "evoformer.blocks is 1000000000, but no model has more than 512"),
        ("structure_module", {"angle_blocks": 10**9}, "angle_blocks is 1000000000, but no model"),
        ("evoformer", {"blocks": 3}, "lacks parameter 'evoformer.blocks.2"),
        ("channels", {"pair": 10**6}, "has the shape"),
        ("channels", {"pair": 10**15}, "unreadable model sizes"),
    ],
)
def test_sizes_are_compared_with_the_arrays_before_a_model_is_built(
    stack: str, change: dict[str, int], message: str, model: AlphaFold, tmp_path: Path, no_models: None
) -> None:
    """Catches a small file that asks for a model of terabytes."""
    sizes = dataclasses.replace(CONFIG, **{stack: dataclasses.replace(getattr(CONFIG, stack), **change)}).to_dict()
    torch.save(checkpoint_of(model, model_config=sizes), tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "x.ckpt")


def test_a_parameter_file_is_compared_before_a_model_is_built(
    model: AlphaFold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_models: None
) -> None:
    """Catches a model built with as many blocks as a file claims to have."""
    arrays = export_deepmind(model)
    stacked = next(key for key in arrays if "evoformer_iteration" in key and "extra" not in key)
    arrays = {key: value[:0] if key == stacked else value for key, value in arrays.items()}
    write_npz(tmp_path / "x.npz", arrays)
    with pytest.raises(UserError, match="has the shape"):
        load_published(tmp_path / "x.npz", "test")
    tensors = export_openfold(model)
    tensors[next(iter(tensors))] = torch.zeros(1)
    write_openfold(tmp_path / "x.pt", tensors)
    with pytest.raises(UserError, match="has the shape"):
        load_published(tmp_path / "x.pt", "test")
    bomb = {
        key: torch.zeros(1).expand(1 << 40) if key == next(iter(tensors)) else value for key, value in tensors.items()
    }
    write_openfold(tmp_path / "y.pt", bomb)
    with pytest.raises(UserError, match="its arrays claim to be larger than the file"):
        load_published(tmp_path / "y.pt", "test")


def test_a_compressed_archive_is_refused(model: AlphaFold, tmp_path: Path) -> None:
    """Catches a megabyte that unpacks to a gigabyte of pickle."""
    save_model(tmp_path / "x.ckpt", model)
    with (
        zipfile.ZipFile(tmp_path / "x.ckpt") as old,
        zipfile.ZipFile(tmp_path / "y.ckpt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    with pytest.raises(UserError, match="it is compressed"):
        own.read_checkpoint(tmp_path / "y.ckpt")
    assert not published.is_parameter_file(tmp_path / "y.ckpt")


def test_an_average_without_arrays_is_no_reason_to_take_other_weights(model: AlphaFold, tmp_path: Path) -> None:
    """Catches a moving average that a file has lost, and the raw weights taken in its place without a word."""
    torch.save(checkpoint_of(model, ema_state_dict={}), path := tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=r"x\.ckpt.*lacks parameter"):
        load_model(path)
    assert load_model(path, raw=True).config == CONFIG
