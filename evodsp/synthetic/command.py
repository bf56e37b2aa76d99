"""`evodsp data synthesize`."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

from evodsp.synthetic import SynthesisConfig, synthesize


@dataclass(frozen=True, kw_only=True)
class SynthesizeSettings(SynthesisConfig):
    """Which families to write, and where."""

    output: Path
    """Folder to create. It must not exist, or be empty."""


def run(settings: SynthesizeSettings, words: list[str]) -> int:
    """Write the families and return the exit code. `words`: the command line (not needed here)."""
    config = SynthesisConfig(
        **{item.name: getattr(settings, item.name) for item in dataclasses.fields(SynthesisConfig)}
    )
    synthesize(settings.output, config, lambda line: print(line, file=sys.stderr))
    return 0
