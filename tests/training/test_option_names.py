"""Names of options are checked before Lightning is imported, which takes seconds."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from evodsp.errors import UserError
from evodsp.training import trainer
from evodsp.training.options import OTHER_TRAINER_OPTIONS, TrainerOptions, checked_words


def test_the_trainers_names_are_those_of_lightning() -> None:
    """Catches an option of Lightning's that is refused, and one that a misspelt name is taken for."""
    listed = set(OTHER_TRAINER_OPTIONS) | set(asdict(TrainerOptions()))
    assert listed == set(inspect.signature(Trainer.__init__).parameters) - {"self"}


def test_the_documentation_has_the_options_that_cannot_work() -> None:
    """Catches an option that is refused and missing from the table, and one that the table has and that is no option."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    table = page.partition("| option of `trainer` |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    options = {re.findall(r"`(\w+)", cell)[0] for cell in cells}
    assert options <= set(OTHER_TRAINER_OPTIONS) | set(asdict(TrainerOptions()))
    assert set(trainer._MUST_BE) <= options
    classes = {name for cell in cells for name in re.findall(r"of the class `(\w+)`", cell)}
    assert classes == {kind.__name__ for kind in trainer._NOT_CALLBACKS}


def test_a_misspelt_option_of_the_trainer_is_found_without_lightning() -> None:
    """Catches seconds of waiting for a mistake of one letter."""
    code = (
        "import sys\nfrom evodsp.cli import main\nassert main(['fit', '--trainer.max_step', '3']) == 2\n"
        "print(sorted({'torch', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "unknown argument '--trainer.max_step'. Did you mean '--trainer.max_steps'?" in done.stderr
    assert done.stdout == "[]\n"


def test_options_that_the_quick_help_leaves_out_are_taken() -> None:
    """Catches options of Lightning, and those of its classes, that are refused."""
    names = ("barebones", "logger.class_path", "callbacks+", "callbacks.monitor", "strategy.init_args.x", "help")
    checked_words("fit", [word for name in names for word in (f"--trainer.{name}", "1")])
    with pytest.raises(UserError, match=r"write --trainer\.max_steps 3"):
        checked_words("fit", ["trainer.max_steps=3"])
