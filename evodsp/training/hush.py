"""What Lightning and PyTorch say in every run, and no user can act on, is not said."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings

_HUSHED = (
    ".*does not have many workers.*",
    ".*is smaller than the logging interval.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    ".*You are trying to `self.log.*",
    ".*FSDP2-wrapped module .* returned a view tensor.*",  # it is never modified in place
    ".*It is recommended to use `self.log.*sync_dist=True.*",  # logged values are equal on all ranks already
    ".*No `val_dataloader`.*|.*You defined a `validation_step` but have no `val_dataloader`.*",
    ".*Total length of .* across ranks is zero.*",  # no validation chains
    ".*The `lightning.pytorch.loops.*",
    ".*GPU available but not used.*",
    ".*could not find the monitored key.*",
    ".*The dirpath has changed from.*",
)


def hush() -> None:
    """Silence the messages of Lightning and PyTorch that do not help the user."""
    for message in _HUSHED:
        warnings.filterwarnings("ignore", message=message)
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Where a profiler without a file says its table.
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's stdout is not
        sys.stdout.reconfigure(line_buffering=True)
