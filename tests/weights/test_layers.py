"""Checkpoints and parameter files of models with other sub-layers than AlphaFold2's."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from evodsp.config import ALPHAFOLD2, ModelConfig, import_layers
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import load_model, save_model
from evodsp.weights.deepmind import export_deepmind, write_npz
from evodsp.weights.initial import initialise
from evodsp.weights.openfold import export_openfold
from evodsp.weights.pretrained import write_folder

TEST = ModelConfig.preset("test")
FEW = tuple(name for name in ALPHAFOLD2 if name not in ("attention_starting", "msa_transition"))
PLANTED = "attention_starting=planted_layers:Starting"


def model_of(layers: tuple[str, ...] | None) -> AlphaFold:
    """A model whose Evoformer has these sub-layers, with random weights."""
    torch.manual_seed(1)
    model = AlphaFold(
        import_layers(dataclasses.replace(TEST, evoformer=dataclasses.replace(TEST.evoformer, layers=layers)))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


@pytest.mark.parametrize("form", ["checkpoint", "npz"])
def test_a_model_with_fewer_sub_layers_takes_what_it_has(form: str, tmp_path: Path) -> None:
    """Catches a whole model that cannot be the start of an ablation, and arrays that are left out in silence."""
    whole, few = model_of(None), model_of(FEW)
    file = tmp_path / "params_model_1.npz"
    if form == "npz":
        write_npz(file, export_deepmind(whole))
    else:
        save_model(file := tmp_path / "whole.ckpt", whole)
    done = initialise(few, file)
    parameters = dict(whole.named_parameters())
    assert all(torch.equal(value, parameters[name]) for name, value in few.named_parameters())
    assert not done.new
    assert done.left_out
    assert all("evoformer" in name and ("transition" in name or "attention_starting" in name) for name in done.left_out)


def test_weights_of_another_class_are_not_taken(tmp_path: Path, planted: str) -> None:
    """Catches a norm of AlphaFold2's attention in a class of one's own that has the same name."""
    save_model(tmp_path / "whole.ckpt", model_of(None))
    own = model_of(tuple(PLANTED if name == "attention_starting" else name for name in ALPHAFOLD2))
    before = {name: value.clone() for name, value in own.named_parameters() if "attention_starting" in name}
    done = initialise(own, tmp_path / "whole.ckpt")
    of_evoformer = [name for name in before if name.startswith("evoformer")]
    assert of_evoformer == list(done.new)
    parameters = dict(own.named_parameters())
    assert all(torch.equal(parameters[name], before[name]) for name in of_evoformer)


@pytest.mark.parametrize("layers", [FEW, (*ALPHAFOLD2, "pair_transition"), (*ALPHAFOLD2[1:], ALPHAFOLD2[0])])
def test_exports_that_other_programs_cannot_run_are_refused(layers: tuple[str, ...]) -> None:
    """Catches a file of AlphaFold2's names whose model is another one."""
    for export in (export_deepmind, export_openfold):
        with pytest.raises(UserError, match=r"the model has its own evoformer\.layers, which no other program can run"):
            export(model_of(layers))


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with a sub-layer."""
    (tmp_path / "planted_layers.py").write_text("from scripts.examples.linear_attention import Starting\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planted_layers", raising=False)
    return "planted_layers"


@pytest.mark.parametrize("form", ["checkpoint", "folder"])
def test_a_file_that_names_a_class_is_read_when_the_user_names_it_too(form: str, tmp_path: Path, planted: str) -> None:
    """Catches code that a checkpoint or a model folder has run."""
    model = model_of((*ALPHAFOLD2[:6], PLANTED, "pair_transition"))
    file = tmp_path / "own.ckpt"
    save_model(file, model)
    if form == "folder":
        file, source = tmp_path / "folder", file
        write_folder(model, file, source)
    del sys.modules[planted]
    with pytest.raises(UserError, match=f"only if you name it, too: --layers '\\[{PLANTED}\\]'"):
        load_model(file)
    assert planted not in sys.modules
    again = load_model(file, layers=[PLANTED])
    assert planted in sys.modules
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), again.parameters(), strict=True))
