"""Training from a feature store: settings that do not go together, and batches like those from the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evodsp.data.build import build
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.errors import UserError
from evodsp.training.chains import ChainDataModule, find_chains
from evodsp.training.config import DataConfig
from tests.builders.builds import config
from tests.builders.training_chains import SEQUENCES


@pytest.fixture(scope="module")
def store(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("built") / "store"
    build(config(chains, output))
    return output


def settings(chains: Path, **changes: object) -> DataConfig:
    folders = {"alignment_dir": str(chains / "alignments"), "structure_dir": str(chains / "mmcif_files")}
    given: dict = {
        **folders,
        "samples_per_epoch": 4,
        "train_chains": list(SEQUENCES),
        "validation_chains": list(SEQUENCES),
        **changes,
    }
    return DataConfig(**given)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.verify)])
def test_batches_equal_those_from_files(chains: Path, store: Path, workers: int) -> None:
    """Catches the setting ignored, and a store that worker processes cannot open."""
    nowhere = {"alignment_dir": "nowhere", "structure_dir": "nowhere", "num_workers": workers, "store": str(store)}
    from_store = find_chains(settings(chains, **nowhere))
    assert isinstance(from_store.store, FeatureStore)
    both = [
        ChainDataModule(settings(chains, num_workers=workers), found)
        for found in (find_chains(settings(chains)), from_store)
    ]
    for loaders in zip(*([m.train_dataloader(), m.val_dataloader()] for m in both), strict=True):
        for expected, found in zip(*loaders, strict=True):
            assert expected.keys() == found.keys()
            assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"store": "nowhere"}, "nowhere: no feature store there"),
        (
            {"train_chains": ["1abc_X"]},
            r"data\.train_chains: no chain '1abc_X' in .*; leave it out.*Did you mean '1abc_A'",
        ),
        (
            {"template_structure_dir": "data"},
            r"data\.template_structure_dir is data, but data\.store holds the templates",
        ),
        ({"obsolete": "obsolete.dat"}, r"data\.obsolete is obsolete\.dat, but data\.store holds"),
        (
            {"max_template_date": "2018-04-30"},
            r"data\.max_template_date is 2018-04-30, but .* was built without templates",
        ),
        ({"max_template_date": "tomorrow"}, r"data\.max_template_date is 'tomorrow', but must be a date"),
    ],
)
def test_wrong_settings_are_one_line(chains: Path, store: Path, changes: dict, message: str) -> None:
    """Catches settings that a store makes meaningless and that are ignored without a word."""
    with pytest.raises(UserError, match=message) as caught:
        find_chains(settings(chains, **{"store": str(store), **changes}))
    assert "\n" not in str(caught.value)
