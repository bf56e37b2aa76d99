"""Checkpoints: what was saved is loaded, and a file that cannot be loaded is reported in one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.config import FeatureConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import (
    check_same_model,
    load_features,
    load_model,
    load_sizes,
    read_checkpoint,
    save_model,
)


@pytest.fixture(scope="module")
def model() -> AlphaFold:
    torch.manual_seed(0)
    return AlphaFold(ModelConfig.preset("test"))


def changed(path: Path, new: Path, **values: Any) -> Path:
    """A copy of the checkpoint with entries replaced, or removed where the value is None."""
    checkpoint = {**torch.load(path, weights_only=True), **values}
    torch.save({key: value for key, value in checkpoint.items() if value is not None}, new)
    return new


def test_raw_and_averaged_weights_come_back_as_saved(model: AlphaFold, tmp_path: Path) -> None:
    """Catches raw and averaged weights exchanged, and `raw` ignored."""
    averaged = {name: value + 1 for name, value in model.named_parameters()}
    save_model(tmp_path / "both.ckpt", model, averaged)
    for raw, expected in ((True, dict(model.named_parameters())), (False, averaged)):
        loaded = load_model(tmp_path / "both.ckpt", raw)
        assert not loaded.training
        assert loaded.config == model.config
        for name, value in loaded.named_parameters():
            assert torch.equal(value, expected[name])


def test_without_an_average_the_raw_weights_are_used(model: AlphaFold, tmp_path: Path) -> None:
    """Catches an error, or other weights, for a checkpoint without a moving average."""
    save_model(tmp_path / "raw.ckpt", model)
    for loaded, saved in zip(load_model(tmp_path / "raw.ckpt").parameters(), model.parameters(), strict=True):
        assert torch.equal(loaded, saved)


def test_a_file_is_read_once(model: AlphaFold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second reading of thousands of arrays: to tell whose file it is, or for the features beside the model."""
    save_model(path := tmp_path / "x.ckpt", model)
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *given, **named: (read.append(given), load(*given, **named))[1])
    for reader in (load_model, load_sizes):
        read.clear()
        reader(path)
        assert len(read) == 1, reader


def test_names_that_wrappers_leave_are_understood(model: AlphaFold, tmp_path: Path) -> None:
    """Catches a checkpoint of a compiled or sharded model whose names are called unknown, and two values of one weight."""
    save_model(path := tmp_path / "plain.ckpt", model)
    plain = read_checkpoint(path)["state_dict"]
    wrapped = {
        name.replace("model.", "_forward_module.model._orig_mod.").replace(
            "blocks.0", "blocks.0._fsdp_wrapped_module"
        ): value
        for name, value in plain.items()
    }
    loaded = load_model(changed(path, tmp_path / "wrapped.ckpt", state_dict=wrapped))
    assert all(torch.equal(one, other) for one, other in zip(loaded.parameters(), model.parameters(), strict=True))
    twice = {**plain, "model._orig_mod.input_embedder.left.bias": plain["model.input_embedder.left.bias"] + 1}
    with pytest.raises(
        UserError, match=r"'model.input_embedder.left.bias' and 'model._orig_mod.*two names of one array"
    ):
        load_model(changed(path, tmp_path / "twice.ckpt", state_dict=twice))


def test_saving_leaves_one_whole_file(model: AlphaFold, tmp_path: Path) -> None:
    """Catches temporary files that saving leaves behind."""
    save_model(tmp_path / "a.ckpt", model)
    save_model(tmp_path / "a.ckpt", model)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of the checkpoint's author ran",)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: None, "no such checkpoint"),
        (lambda path: path.mkdir(), "not a DeepSpeed checkpoint"),
        (lambda path: path.write_bytes(b""), "neither a checkpoint nor"),
        (lambda path: path.write_text(">query\nMKT\n"), "neither a checkpoint nor"),
        (lambda path: torch.save({"state_dict": {}}, path), "lacks format_version, model_config"),
        (lambda path: torch.save([1, 2], path), "lacks format_version"),
        (lambda path: torch.save({"x": Malicious()}, path), "not a readable checkpoint"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, expected: str
) -> None:
    """Catches a traceback, a message without the path, and code in the file that runs."""
    make(path := tmp_path / "x.ckpt")
    with pytest.raises(UserError) as caught:
        load_model(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert expected in message
    assert "\n" not in message
    assert "ran" not in capsys.readouterr().out


def test_a_truncated_checkpoint_is_one_line(model: AlphaFold, tmp_path: Path) -> None:
    """Catches a traceback for a file that is cut short."""
    save_model(path := tmp_path / "x.ckpt", model)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UserError, match="cut short"):
        read_checkpoint(path)


def test_what_does_not_fit_is_named(model: AlphaFold, tmp_path: Path) -> None:
    """Catches parameters that silently keep their random initial values, and unknown versions or sizes that are ignored."""
    save_model(path := tmp_path / "x.ckpt", model)
    weights = torch.load(path, weights_only=True)["state_dict"]
    first = min(weights)
    cases = {
        f"no array '{first.removeprefix('model.')}'": {name: value for name, value in weights.items() if name != first},
        "no parameter for array 'extra'": {**weights, "model.extra": torch.zeros(1)},
        "has the shape": {**weights, first: torch.zeros(99)},
    }
    for expected, state in cases.items():
        with pytest.raises(UserError, match=expected):
            load_model(changed(path, tmp_path / "y.ckpt", state_dict=state))
    with pytest.raises(UserError, match="format version 99"):
        load_model(changed(path, tmp_path / "y.ckpt", format_version=99))
    sizes = {**model.config.to_dict(), "chanels": {}}
    with pytest.raises(UserError, match="Did you mean 'channels'"):
        load_model(changed(path, tmp_path / "y.ckpt", model_config=sizes))


def test_feature_sizes_come_back_as_saved(model: AlphaFold, tmp_path: Path) -> None:
    """Catches a feature size that is lost.

    No size here is the default, because a lost one would then go unseen.
    """
    features = FeatureConfig(
        crop_size=None, msa_clusters=7, extra_msa=5, max_templates=2, recycles=1, masked_msa_fraction=0.25
    )
    save_model(path := tmp_path / "x.ckpt", model, features=features)
    assert load_features(path) == features
    save_model(path, model)
    assert load_features(path) == FeatureConfig()


def test_feature_sizes_of_older_checkpoints_load(model: AlphaFold, tmp_path: Path) -> None:
    """Catches old checkpoints refused because of `ensembles`, which used to be a feature size."""
    save_model(path := tmp_path / "x.ckpt", model)
    older = {**dataclasses.asdict(FeatureConfig(msa_clusters=7)), "ensembles": 1}
    assert load_features(changed(path, tmp_path / "y.ckpt", format_version=1, features=older)) == FeatureConfig(
        msa_clusters=7
    )


@pytest.mark.parametrize(
    ("features", "expected"),
    [({"msa_cluster": 3}, "'features.msa_cluster'. Did you mean 'msa_clusters'"), ([3], "'features' is a list")],
)
def test_unreadable_feature_sizes_are_one_line(model: AlphaFold, tmp_path: Path, features: Any, expected: str) -> None:
    """Catches a traceback, and an unknown key that is silently dropped."""
    save_model(path := tmp_path / "x.ckpt", model)
    with pytest.raises(UserError) as caught:
        load_features(changed(path, new := tmp_path / "y.ckpt", features=features))
    assert expected in str(caught.value)
    assert str(caught.value).startswith(str(new))
    assert "\n" not in str(caught.value)


def test_only_sizes_that_matter_must_agree(model: AlphaFold, tmp_path: Path) -> None:
    """Catches a run refused because of another dropout or recomputation, and one with other sizes accepted."""
    save_model(path := tmp_path / "x.ckpt", model)
    checkpoint, config = read_checkpoint(path), model.config
    other = dataclasses.replace(
        config, evoformer=dataclasses.replace(config.evoformer, msa_dropout=0.5, checkpoint=True)
    )
    check_same_model(path, checkpoint, other)
    other = dataclasses.replace(config, evoformer=dataclasses.replace(config.evoformer, blocks=3))
    with pytest.raises(UserError, match=r"model\.evoformer\.blocks 2, but the config says 3"):
        check_same_model(path, checkpoint, other)


def test_a_bit_that_is_lost_is_named(model: AlphaFold, tmp_path: Path) -> None:
    """Catches predictions with wrong weights, and a traceback where the name of a parameter is damaged."""
    save_model(tmp_path / "whole.ckpt", model)
    content = (tmp_path / "whole.ckpt").read_bytes()
    load_model(tmp_path / "whole.ckpt")
    numbers = next(iter(model.parameters())).detach().numpy().tobytes()
    for at in (content.index(numbers) + 3, content.index(b"structure_module") + 1):
        broken = bytearray(content)
        broken[at] ^= 4
        (tmp_path / "broken.ckpt").write_bytes(broken)
        with pytest.raises(UserError, match=r"broken\.ckpt: damaged \(.* has another checksum\); copy it again"):
            load_model(tmp_path / "broken.ckpt")
