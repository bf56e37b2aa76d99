"""Names of options are checked before Lightning is imported, which takes seconds."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from lightning.pytorch import Trainer

from evodsp.errors import UserError
from evodsp.training.options import OTHER_TRAINER_OPTIONS, TrainerOptions, check_names


def test_the_trainers_names_are_those_of_lightning() -> None:
    """Catches an option of Lightning's that is refused, and one that a misspelt name is taken for."""
    listed = OTHER_TRAINER_OPTIONS | set(TrainerOptions.__dataclass_fields__)
    assert listed == set(inspect.signature(Trainer.__init__).parameters) - {"self"}


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
    check_names("fit", [word for name in names for word in (f"--trainer.{name}", "1")])
    with pytest.raises(UserError, match=r"write --trainer\.max_steps 3"):
        check_names("fit", ["trainer.max_steps=3"])
