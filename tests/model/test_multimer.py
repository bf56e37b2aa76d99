"""The parts of AlphaFold-Multimer's model that are not AlphaFold2's, against their definitions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from evodsp.cli import main
from evodsp.config import EmbedderConfig, TemplateConfig
from evodsp.model.dropout import NO_DROPOUT
from evodsp.model.multimer import ChainRelativePosition, ChainTemplateEmbedder, ChainTemplates, ChainTorsionEmbedder
from evodsp.model.sharded import Sharded
from evodsp.parallel.testing import dense
from tests.builders.small_model import features_of_chains

ROOT = Path(__file__).resolve().parents[2]
SIZES = TemplateConfig(
    True, channels=8, blocks=1, pair_heads=2, pair_head_width=3, triangle_channels=5, checkpoint=False
)


def test_relative_positions_are_deepminds() -> None:
    """Catches bins of another bound, copies of a chain taken for one chain, and a bin of the wrong vector."""
    bound, copies = 3, 1
    layer = dense(ChainRelativePosition(5, EmbedderConfig(max_relative_position=bound, max_relative_chain=copies)))
    chains = [(1, 1, 1, 6), (2, 2, 1, 3), (3, 2, 2, 2), (4, 2, 3, 2), (5, 3, 1, 1)]  # asym, entity, sym, residues
    residues = [(asym, entity, sym, n) for asym, entity, sym, length in chains for n in range(length)]
    columns = torch.tensor(residues).unbind(1)
    names = ("asym_id", "entity_id", "sym_id", "residue_index")
    features = {name: column[None].int() for name, column in zip(names, columns, strict=True)}
    rows = []
    for asym, entity, sym, index in residues:
        for other_asym, other_entity, other_sym, other_index in residues:
            offset = min(max(index - other_index + bound, 0), 2 * bound) if asym == other_asym else 2 * bound + 1
            chain = min(max(sym - other_sym + copies, 0), 2 * copies) if entity == other_entity else 2 * copies + 1
            equal = torch.tensor([float(entity == other_entity)], dtype=torch.float64)
            one_hot = (F.one_hot(torch.tensor(bin_), count).double() for bin_, count in ((offset, 8), (chain, 4)))
            first, last = one_hot
            rows.append(torch.cat([first, equal, last]))
    count = len(residues)
    expected = (torch.stack(rows) @ layer.weight.t()).view(1, count, count, 5)
    found = layer(features, slice(2, 9), slice(1, None))
    torch.testing.assert_close(found, expected[:, 2:9, 1:], rtol=1e-12, atol=1e-12)


def given() -> tuple[Tensor, ChainTemplates]:
    """A pair representation, and templates of a complex of three chains."""
    features = {name: x[:, 0] for name, x in features_of_chains(2).items()}
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(2, 7, 7, 6, dtype=torch.float64, generator=generator)
    found = ChainTemplates.from_features(features)
    atoms = torch.ones_like(found.atom_mask)
    return z, dataclasses.replace(found, atom_mask=atoms, beta_mask=torch.ones_like(found.beta_mask))


def updated(embedder: ChainTemplateEmbedder, z: Tensor, templates: ChainTemplates) -> Tensor:
    pair = Sharded.whole(z.clone(), "j", torch.ones_like(z[..., 0]))
    pair += embedder(pair, templates)
    return pair.x - z


def test_templates_say_nothing_between_chains() -> None:
    """Catches distances and directions between chains, whose templates come from different structures."""
    z, templates = given()
    embedder = dense(ChainTemplateEmbedder(6, SIZES))
    expected = updated(embedder, z, templates)
    moved = (templates.chain == 2).unsqueeze(1).unsqueeze(-1) * torch.tensor([3.0, -40.0, 9.0], dtype=torch.float64)
    found = updated(
        embedder,
        z,
        dataclasses.replace(
            templates, positions=templates.positions + moved.unsqueeze(-2), beta=templates.beta + moved
        ),
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    together = dataclasses.replace(templates, chain=torch.ones_like(templates.chain))
    assert (updated(embedder, z, together) - expected).abs().max() > 1e-3


def test_a_missing_template_counts_in_the_mean() -> None:
    """Catches a mean over the templates that are there: the published models have learnt the sum over four places."""
    z, templates = given()
    embedder = dense(ChainTemplateEmbedder(6, SIZES))
    missing = {
        name: torch.zeros_like(getattr(templates, name)) for name in ("positions", "atom_mask", "beta", "beta_mask")
    }
    pair = Sharded.whole(z, "j", torch.ones_like(z[..., 0]))
    absent = dataclasses.replace(templates, aatype=torch.full_like(templates.aatype, 21), **missing).only(slice(1))
    both = dataclasses.replace(
        templates,
        **{
            field.name: torch.cat([getattr(templates.only(slice(1)), field.name), getattr(absent, field.name)], 1)
            for field in dataclasses.fields(templates)
            if field.name != "chain"
        },
    )
    embedded = [embedder.embedded(pair, one, NO_DROPOUT)[:, 0] for one in (templates.only(slice(1)), absent)]
    expected = embedder.output((sum(embedded) / 2).relu())
    torch.testing.assert_close(updated(embedder, z, both), expected, rtol=1e-9, atol=1e-9)
    assert embedded[1].abs().max() > 1e-3


def test_rows_of_templates_count_where_chi1_is_defined() -> None:
    """Catches the mask of psi, with which glycine would count, and angles that are not masked."""
    _, templates = given()
    aatype = templates.aatype.clone()
    aatype[:, :, 0], aatype[:, :, 1], aatype[:, :, 2] = 7, 11, 21  # glycine, lysine, gap
    features = ChainTorsionEmbedder.features(dataclasses.replace(templates, aatype=aatype))
    assert features.shape[-1] == 34
    assert torch.equal(features[..., :22].argmax(-1), aatype.long())
    sines, cosines, defined = features[..., 22:].split(4, -1)
    assert defined[:, :, 0].sum() == defined[:, :, 2].sum() == 0
    assert (defined[:, :, 1] == 1).all()
    torch.testing.assert_close(sines.square() + cosines.square(), defined, rtol=1e-6, atol=1e-6)
    embedder = dense(ChainTorsionEmbedder(3))
    features = ChainTorsionEmbedder.features(templates)
    assert torch.equal(embedder(features)[1], features[..., -4])


def test_a_run_on_the_names_of_chains_says_that_samples_are_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an error in the middle of the first step, or one that does not say what is expected."""
    monkeypatch.chdir(ROOT)
    config = ["--config", "configs/quickstart.yaml", "--model.arrangement=multimer"]
    assert main(["fit", *config, f"--output={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert "samples of a multimer are entries" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
