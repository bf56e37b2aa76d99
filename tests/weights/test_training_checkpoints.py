"""OpenFold's training checkpoints: Lightning's files, DeepSpeed's folders, and malicious files."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.weights.checkpoint import is_parameter_file, load_model, save_model
from evodsp.weights.deepmind import export_deepmind, write_npz
from evodsp.weights.openfold import export_openfold, read_openfold
from evodsp.weights.parameter_file import parameter_file
from evodsp.weights.untrusted import Inert, load_untrusted
from tests.builders.weights import (
    SMALL,
    Arrays,
    averaged,
    foreign_module,
    prefixed,
    random_model,
    save_deepspeed_checkpoint,
    save_training_checkpoint,
)


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return export_openfold(random_model(SMALL, 0))


def equal(found: Arrays, expected: Arrays) -> bool:
    """Whether both have the same names and bitwise the same values."""
    return found.keys() == expected.keys() and all(torch.equal(found[key], value) for key, value in expected.items())


def test_hyperparameters_of_unknown_classes_are_skipped(arrays: Arrays, tmp_path: Path) -> None:
    """Catches OpenFold's training checkpoints refused because save_hyperparameters stores ml_collections objects in them."""
    content = {"state_dict": prefixed("model.", arrays), "ema": {"params": averaged(arrays), "decay": 0.999}}
    save_training_checkpoint(path := tmp_path / "12-3000.ckpt", content)
    before = set(torch.serialization.get_safe_globals())
    assert "ml_collections" not in sys.modules
    assert is_parameter_file(path)
    assert equal(read_openfold(path), averaged(arrays))
    assert equal(read_openfold(path, raw=True), arrays)
    assert "ml_collections" not in sys.modules
    assert set(torch.serialization.get_safe_globals()) == before  # the next torch.load is as strict as before


@pytest.mark.verify
def test_a_deepspeed_folder_is_read(arrays: Arrays, tmp_path: Path) -> None:
    """Catches the wrong file or tag, and the 16-bit weights instead of the moving average."""
    save_deepspeed_checkpoint(folder := tmp_path / "12-3000.ckpt", arrays, tag="global_step3000")
    save_deepspeed_checkpoint(folder, averaged(arrays), tag="global_step9")
    for tag, expected in (("global_step9", averaged(arrays)), ("global_step3000", arrays)):
        (folder / "latest").write_text(tag)
        for path in (folder, folder / tag, folder / tag / "mp_rank_00_model_states.pt"):
            assert is_parameter_file(path)
            assert equal(read_openfold(path), averaged(expected))
            assert equal(read_openfold(path, raw=True), {key: value.bfloat16() for key, value in expected.items()})
    (folder / "latest").unlink()
    (folder / "global_step9").rename(folder / "checkpoint")
    assert parameter_file(folder) == folder / "checkpoint" / "mp_rank_00_model_states.pt"


def test_a_deepspeed_folder_through_the_commands(arrays: Arrays, tmp_path: Path) -> None:
    """Catches a folder refused by `weights import` or `load_model`, and raw weights instead of the average."""
    model = random_model(SMALL, 0)
    like, folder = tmp_path / "like.ckpt", tmp_path / "12-3000.ckpt"
    save_model(like, model)
    save_deepspeed_checkpoint(folder, arrays)
    words = ["weights", "import", "--checkpoint", folder, "--like", like, "--output", tmp_path / "out.ckpt"]
    assert main([str(word) for word in words]) == 0
    loaded = dict(load_model(tmp_path / "out.ckpt").named_parameters())
    assert all(torch.equal(loaded[name], value + 1) for name, value in model.named_parameters())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda folder: (folder / "latest").write_text("../12-3000.ckpt/checkpoint"), "latest: names no folder in"),
        (lambda folder: states(folder).unlink(), "but not a DeepSpeed checkpoint"),
        (lambda folder: states(folder).rename(states(folder, "zero_pp_rank_0_")), "ZeRO stage 3"),
        (lambda folder: states(folder).with_name("mp_rank_01_model_states.pt").touch(), "2 files"),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_line(
    arrays: Arrays, tmp_path: Path, change: Callable[[Path], Any], expected: str
) -> None:
    """Catches a traceback, a file of another tag, and one of several files taken for all arrays."""
    save_deepspeed_checkpoint(folder := tmp_path / "12-3000.ckpt", arrays)
    change(folder)
    for read in (read_openfold, is_parameter_file, load_model):
        with pytest.raises(UserError) as caught:
            read(folder)
        assert str(caught.value).startswith(str(folder))
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)


def states(folder: Path, prefix: str = "") -> Path:
    """The file of the model's states in a DeepSpeed folder."""
    return folder / "checkpoint" / f"{prefix}mp_rank_00_model_states.pt"


class Calls:
    """Is pickled as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda trace: Calls(os.system, f"touch {trace}"), "posix.system"),
        (lambda trace: Calls(eval, f"open({str(trace)!r}, 'w')"), "builtins.eval"),
        (lambda trace: Calls(open, str(trace), "w"), None),  # a stand-in for io.open, which cannot open a file
        (lambda trace: Calls(pickle.loads, pickle.dumps(Calls(eval, f"open({str(trace)!r}, 'w')"))), None),
    ],
)
def test_nothing_of_a_malicious_file_runs(
    arrays: Arrays, tmp_path: Path, make: Callable[[Path], Any], named: str | None
) -> None:
    """Catches code that runs when a pickle is read, alone or inside a real checkpoint."""
    trace, path = tmp_path / "trace.npy", tmp_path / "x.ckpt"
    for content in (make(trace), {"state_dict": prefixed("model.", arrays), "x": make(trace)}):
        torch.save(content, path)
        assert (error_of(load_untrusted, path) or "").count(f"asks to call '{named}'") == (named is not None)
        for read in (is_parameter_file, read_openfold, load_model):
            assert "\n" not in (error_of(read, path) or "")
        assert not trace.exists()
    # The file's code does run without protection; otherwise the lines above would prove nothing.
    torch.load(path, weights_only=False)
    assert trace.exists()


def error_of(read: Callable[[Path], Any], path: Path) -> str | None:
    """The message of the UserError that `read` raises, or None if it raises nothing."""
    try:
        read(path)
    except UserError as error:
        return str(error)
    return None


def test_stand_ins_keep_nothing(tmp_path: Path) -> None:
    """Catches a stand-in class that takes attributes or methods from the file."""

    class Sneaky:
        def __init__(self) -> None:
            self.__dict__ |= {"__setstate__": 1, "keys": 2}

    class Slotted:
        __slots__ = ("x",)

    slotted = Slotted()
    slotted.x = 3  # type: ignore[attr-defined]
    with foreign_module("elsewhere", Sneaky=Sneaky, Slotted=Slotted):
        torch.save([Sneaky(), slotted, torch.ones(2)], path := tmp_path / "x.pt")
    first, second, tensor = load_untrusted(path)
    assert isinstance(first, Inert)
    assert isinstance(second, Inert)
    assert (vars(first), vars(second)) == ({}, {})
    assert torch.equal(tensor, torch.ones(2))


def test_a_multimer_file_is_called_one(arrays: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a multimer file reported as a damaged monomer file, with a missing or unknown array."""
    torch.save({**arrays, "structure_module.ipa.linear_k.weight": torch.ones(2, 2)}, openfold := tmp_path / "m.pt")
    key = "alphafold/alphafold_iteration/evoformer/~_relative_encoding/position_activations//weights"
    write_npz(deepmind := tmp_path / "m.npz", {**export_deepmind(random_model(SMALL, 0)), key: np.ones((73, 8), "f4")})
    for file in (openfold, deepmind):
        words = ["weights", "import", "--checkpoint", str(file), "--output", str(tmp_path / "x.ckpt")]
        assert main([*words, "--preset", "model_1"]) == 2
        assert "holds a multimer model, but the model's arrangement is monomer" in (error := capsys.readouterr().err)
        assert error.count("\n") == 1
        torch.save(arrays, monomer := tmp_path / "one.pt")
    words = ["weights", "import", "--checkpoint", str(monomer), "--output", str(tmp_path / "x.ckpt")]
    assert main([*words, "--preset", "model_1_multimer_v3"]) == 2
    assert "holds a monomer model, but the model's arrangement is multimer" in capsys.readouterr().err
