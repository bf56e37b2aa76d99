"""Seeded families of made-up proteins in OpenFold's on-disk layout, to try and test training without a download."""

from __future__ import annotations

from scripts.examples.synthetic.config import SynthesisConfig
from scripts.examples.synthetic.writers import synthesize

__all__ = ["SynthesisConfig", "synthesize"]
