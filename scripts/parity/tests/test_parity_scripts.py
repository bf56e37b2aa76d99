"""The parts of `make parity` that decide its result. `make parity` itself takes minutes and needs DeepMind's JAX code."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from evodsp.config import ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.deepmind import set_parameters
from evodsp.weights.openfold import export_openfold
from scripts.parity import chain_losses, compare, peer_calls, table
from scripts.parity import openfold_side as side
from scripts.parity.subject import Sizes, Subject, shallow

ROOT = Path(__file__).resolve().parents[3]
SIZES = Sizes(residues=24, padded_residues=3, clusters=6, extra=7)
CONFIG = shallow(ModelConfig.preset("model_1_ptm"), evoformer=2, extra_msa=1, template=1, structure_iterations=1)
SMALL = dataclasses.replace(CONFIG, templates=dataclasses.replace(CONFIG.templates, enabled=False))


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.draw(SMALL, SIZES, seed=3, fused=False)


def test_parameters_are_dense_and_scaled_by_their_inputs(subject: Subject) -> None:
    """Catches a zero layer, which would hide all layers before it, and one that dominates the others."""
    for key, array in subject.parameters.items():
        assert array.dtype == np.float32
        assert (array != 0).mean() > 0.99, key
    root = "alphafold/alphafold_iteration/evoformer/evoformer_iteration"
    output = subject.parameters[f"{root}/outer_product_mean//output_w"]  # blocks, 32, 32, 128
    assert output.std() == pytest.approx(1 / 32, rel=0.05)
    gate = subject.parameters[f"{root}/triangle_multiplication_outgoing/left_gate//bias"]
    assert gate.mean() == pytest.approx(1, abs=0.1)


def test_a_seed_means_the_same_subject_and_another_seed_another() -> None:
    """Catches random draws that ignore the seed: a difference that was found could not be reproduced."""
    first, same, other = (Subject.draw(SMALL, SIZES, seed, fused=True).flat() for seed in (3, 3, 4))
    assert all(np.array_equal(first[key], same[key]) for key in first)
    for part in ("parameters", "features", "structure"):
        assert any(key.startswith(part) and not np.array_equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(
    "name",
    ["seq_mask", "msa_mask", "extra_msa_mask", "template_mask", "template_pseudo_beta_mask", "atom37_atom_exists"],
)
def test_every_mask_holds_padding(subject: Subject, name: str) -> None:
    """Catches a mask of ones, with which a module that ignores the mask would agree."""
    mask = subject.features[name]
    assert set(np.unique(mask)) == {0, 1}
    if mask.ndim > 2 and "template" not in name and "atom" not in name:
        assert not mask[:, :, SIZES.residues :].any()
        assert not mask[:, -SIZES.padded_rows :].any()
        assert (mask[:, 1 : -SIZES.padded_rows, : SIZES.residues] == 0).any(), "no letter is missing by itself"


def test_the_label_is_a_chain_with_missing_atoms(subject: Subject) -> None:
    """Catches atoms on top of each other and impossible bonds, whose torsions would be rounding noise."""
    positions, mask = subject.structure["all_atom_positions"], subject.structure["all_atom_mask"]
    n, ca, c = (positions[: SIZES.residues, atom] for atom in range(3))
    there = mask[: SIZES.residues, :3].all(-1)
    assert 3 <= (~there).sum() < SIZES.residues / 2
    assert np.linalg.norm(ca - n, axis=-1)[there] == pytest.approx(1.459, abs=1e-3)
    bonded = there[:-1] & there[1:]
    assert np.linalg.norm(n[1:] - c[:-1], axis=-1)[bonded] == pytest.approx(1.329, abs=1e-3)


def sides(residues: int = 4) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two equal sides and their features, with one padded residue and one padded row."""
    rng = np.random.default_rng(0)
    theirs = {
        "masked_msa/logits": rng.normal(size=(3, residues, 23)),
        "structure/positions": rng.normal(size=(residues, 37, 3)),
        "loss/total": np.array(2.0),
        "gradient/a/b//weights": rng.normal(size=(5, 6)),
        "gradient/a/c//bias": np.full(3, 1e-9),
    }
    seq_mask = np.ones((1, residues))
    seq_mask[:, -1] = 0
    msa_mask = np.ones((1, 3, residues)) * seq_mask[:, None]
    msa_mask[:, -1] = 0
    exists = np.ones((1, residues, 37)) * seq_mask[..., None]
    features = {"seq_mask": seq_mask, "msa_mask": msa_mask, "atom37_atom_exists": exists}
    return {name: values.copy() for name, values in theirs.items()}, theirs, features


def test_equal_sides_pass() -> None:
    """Catches a difference reported between equal sides."""
    rows = table.compare(*sides())
    assert all(row.passed and row.measured == 0 for row in rows)
    assert table.text(rows).endswith("5 quantities, all within what is allowed")


@pytest.mark.parametrize(
    ("name", "where", "by", "quantity"),
    [
        ("masked_msa/logits", (0, 1, 2), 1e-3, "masked_msa/logits"),
        ("structure/positions", (2, 3, 0), 2e-3, "atom positions"),
        ("loss/total", (), 1e-4, "loss total"),
        ("gradient/a/b//weights", (2, 2), 1e-1, "gradient difference, 2 parameters"),
        ("loss/total", (), np.nan, "loss total"),
        ("gradient/a/c//bias", (0,), np.nan, "gradient norm, 2 parameters"),
    ],
)
def test_a_difference_is_found(name: str, where: tuple[int, ...], by: float, quantity: str) -> None:
    """Catches a quantity that is not compared, and NaN that counts as equal."""
    ours, theirs, features = sides()
    ours[name][where] += by
    beyond = [row.quantity for row in table.compare(ours, theirs, features) if not row.passed]
    assert quantity in beyond
    assert f"{len(beyond)} beyond what is allowed" in table.text(table.compare(ours, theirs, features))


@pytest.mark.parametrize(("name", "where"), [("masked_msa/logits", (0, 3)), ("masked_msa/logits", (2, 0))])
def test_padding_is_not_compared(name: str, where: tuple[int, ...]) -> None:
    """Catches a comparison of the noise that AF2 leaves in padded residues and rows."""
    ours, theirs, features = sides()
    ours[name][where] += 1
    assert all(row.passed for row in table.compare(ours, theirs, features))


def test_a_quantity_that_we_lack_is_an_error() -> None:
    """Catches a head or a parameter of the other side that is skipped because ours lacks it."""
    ours, theirs, features = sides()
    del ours["gradient/a/c//bias"]
    with pytest.raises(KeyError):
        table.compare(ours, theirs, features)


def test_openfold_is_skipped_only_if_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback if OpenFold is missing, and a broken OpenFold that is skipped."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setitem(sys.modules, "attn_core_inplace_cuda", ModuleType("attn_core_inplace_cuda"))
    package = tmp_path / "openfold.py"  # precedes an installed OpenFold on the path

    package.write_text("raise ModuleNotFoundError('No module named openfold', name='openfold')\n")
    assert (side.main(), capsys.readouterr().err) == (compare.SKIPPED, "")
    package.write_text("raise ModuleNotFoundError('No module named tree', name='tree')  # a requirement\n")
    assert side.main() == 1
    assert "No module named tree" in (message := capsys.readouterr().err)
    assert message.count("\n") == 1
    monkeypatch.setenv(side.SOURCE, str(tmp_path))
    assert side.main() == 1
    assert "stereo_chemical_props.txt: missing" in capsys.readouterr().err


def test_the_kernel_s_stand_in_is_softmax_with_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wrong replacement for OpenFold's kernel: the comparison would blame OpenFold."""
    monkeypatch.setitem(sys.modules, "attn_core_inplace_cuda", ModuleType("attn_core_inplace_cuda"))
    side.replace_kernel()
    kernel = sys.modules["attn_core_inplace_cuda"]
    generator = torch.Generator().manual_seed(0)
    logits, values, grad = (torch.randn(size, generator=generator) for size in ((2, 3, 5), (2, 5, 4), (2, 3, 4)))
    logits.requires_grad_()
    expected = logits.softmax(-1)
    (expected @ values).backward(grad)
    in_place = logits.detach().clone()
    kernel.forward_(in_place, 6, 5)
    torch.testing.assert_close(in_place, expected)
    kernel.backward_(in_place, grad, values, 6, 5, 4)
    torch.testing.assert_close(in_place, logits.grad)


def test_the_angle_s_deviation_is_corrected_in_that_term_only() -> None:
    """Catches a correction that changes the bond term too, or that stays in place after the call."""
    constants = SimpleNamespace(
        between_res_bond_length_stddev_c_n=[0.014, 0.016], between_res_cos_angles_ca_c_n=[-0.4473, 0.0311]
    )

    def released() -> dict[str, float]:
        bond = constants.between_res_bond_length_stddev_c_n[0]
        return {"c_n_loss_mean": bond, "ca_c_n_loss_mean": bond}

    loss = SimpleNamespace(between_residue_bond_loss=released)
    side.correct_angle_deviation(loss, constants)
    assert loss.between_residue_bond_loss() == {"c_n_loss_mean": 0.014, "ca_c_n_loss_mean": 0.0311}
    assert released() == {"c_n_loss_mean": 0.014, "ca_c_n_loss_mean": 0.014}


def test_an_aligned_error_of_zero_is_in_the_first_bin() -> None:
    """Catches a diagonal whose bin depends on rounding, and other labels or losses that change with it."""
    seen: list[torch.Tensor] = []
    loss = SimpleNamespace(
        lddt=lambda: 0.5,
        softmax_cross_entropy=lambda logits, labels: seen.append(labels),
        tm_loss=lambda labels: loss.softmax_cross_entropy(None, labels),
    )
    side.settle_bin_edges(loss)
    labels = torch.nn.functional.one_hot(torch.full((3, 3), 1), 4)
    loss.tm_loss(labels)
    loss.softmax_cross_entropy(None, labels)
    assert torch.equal(seen[0].argmax(-1), 1 - torch.eye(3).long())
    assert torch.equal(seen[1], labels)
    assert loss.lddt() == 0.5 + 1e-6


def test_openfold_s_gradients_come_into_deepmind_s_layout(subject: Subject) -> None:
    """Catches a gradient compared with another parameter's, or transposed or split wrongly."""
    model = AlphaFold(SMALL)
    set_parameters(model, subject.parameters)
    theirs = {f"gradient/{name}": value.numpy() for name, value in export_openfold(model, legacy=True).items()}
    converted = compare.in_deepmind_layout(SMALL, subject, {**theirs, "loss/total": np.array(2.0)})
    assert converted.pop("loss/total") == 2.0
    assert converted.keys() == {f"gradient/{key}" for key in subject.parameters}
    assert all(np.array_equal(converted[f"gradient/{key}"], value) for key, value in subject.parameters.items())


def test_a_loss_of_complexes_that_differs_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a term that is not compared, an exit code that hides a difference, and a missing package as a traceback."""
    assert chain_losses.main(["--alphafold", sys.executable]) == 2
    assert "has no package alphafold" in capsys.readouterr().err
    theirs = chain_losses.evodsp_side(chain_losses.draw(seed=1))
    assert all(np.abs(values).max() > 0 for values in theirs.values())
    monkeypatch.setattr(chain_losses, "deepminds_side", lambda *_: theirs)
    assert chain_losses.main(["--alphafold", "python", "--seed", "1"]) == 0
    for name in theirs:
        changed = {**theirs, name: theirs[name] + 1e-4 * np.abs(theirs[name]).max()}
        monkeypatch.setattr(chain_losses, "deepminds_side", lambda *_, changed=changed: changed)
        assert chain_losses.main(["--alphafold", "python", "--seed", "1"]) == 1


def test_a_call_that_the_other_program_no_longer_takes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a comparison that ends in the middle, or in a traceback, since the other program's functions changed: OpenFold's
    make_msa_features takes one argument where it took two."""
    package = tmp_path / "peer_of_a_test"
    (package / "data").mkdir(parents=True)
    for folder in (package, package / "data"):
        (folder / "__init__.py").touch()
    (package / "data" / "pipeline.py").write_text(
        "import functools\n"
        "def make_msa_features(msas): ...\n"
        "def read(path, *, form=''): ...\n"
        "@functools.wraps(lambda protein, prefix: None)\n"
        "def curried(*args): ...\n"
        "class Reader:\n"
        "    def get(self, path): ...\n"
    )
    script = tmp_path / "side.py"
    script.write_text(
        "def run(msas, deletions):\n"
        "    from peer_of_a_test.data import pipeline\n"
        "    pipeline.make_msa_features(msas)\n"
        "    pipeline.read('x', form='sto')\n"
        "    pipeline.read(*msas); pipeline.curried('')\n"
        "    pipeline.make_msa_features(msas, deletions)\n"
        "    pipeline.read('x', format='sto')\n"
        "    pipeline.gone()\n"
        "    reader = pipeline.Reader()\n"
        "    reader.get('x'); reader.get('x', None)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = list(peer_calls.changed_calls(script, "peer_of_a_test"))
    assert [line.split(": ")[0] for line in found] == [
        "side.py, line 6",
        "side.py, line 7",
        "side.py, line 8",
        "side.py, line 10",
    ]
    assert "make_msa_features has changed: too many positional arguments, it takes (msas); adapt the call" in found[0]
    assert "'format'" in found[1]
    with pytest.raises(SystemExit, match="line 6"):
        peer_calls.check_calls(str(script), "peer_of_a_test")


@pytest.mark.parametrize("path", sorted((ROOT / "scripts" / "parity").glob("*_side.py")), ids=lambda path: path.stem)
def test_every_other_side_checks_its_calls(path: Path) -> None:
    """Catches a side whose calls nobody compares with the program that is installed."""
    if path.stem != "evodsp_side":
        assert "serve(__file__, " in path.read_text()
