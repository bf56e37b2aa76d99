"""Hooks that send gradients during the backward pass belong to one fit: they are gone when it ends, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from evodsp.errors import UserError
from evodsp.training import command
from tests.builders.training import CommandPool


class Fails(Callback):
    """Ends the run in the second step, on all ranks."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            raise UserError("planted")


@contextmanager
def _hooks_are_gone_afterwards() -> Iterator[None]:
    built: list[command.Built] = []
    seen: list[int] = []
    build, hook = command.build, "register_post_accumulate_grad_hook"

    def remember(*given: Any) -> command.Built:
        built.append(build(*given))
        parameter = type(next(built[0].module.parameters()))
        register = getattr(parameter, hook)
        patch = mock.patch.object(parameter, hook, lambda *of: (seen.append(1), register(*of))[1])
        patch.start()
        return built[0]

    try:
        with mock.patch.object(command, "build", remember):
            yield
    finally:
        mock.patch.stopall()
    assert seen, "no hook was ever there"
    left = [name for name, parameter in built[0].module.named_parameters() if parameter._post_accumulate_grad_hooks]
    assert not left, left


@pytest.mark.verify
def test_hooks_end_with_the_fit(commands: CommandPool, chains: Path, tmp_path: Path) -> None:
    """Catches a second fit of the same module in which the hooks of the first one send buckets too, also where the first one
    failed: Lightning then calls no `teardown` of the module."""
    words = ("fit", f"--config={chains}/tiny.yaml", "--parallel.sequence=2", "--trainer.max_steps=2",
             "--trainer.limit_val_batches=0", "--model.optimizer.clip=batch")  # fmt: skip
    fails = "--trainer.callbacks=tests.training.test_gradient_hooks.Fails"
    for code, options in ((0, []), (2, [fails])):
        output = f"--output={tmp_path}/{code}"
        outcomes = commands.evodsp(2, *words, *options, output, around=_hooks_are_gone_afterwards)
        assert [outcome.code for outcome in outcomes] == [code, code], outcomes
