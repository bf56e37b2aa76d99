"""Seeded families of made-up proteins in OpenFold's on-disk layout, to try and test training without a download."""

from __future__ import annotations

from scripts.examples.synthetic.command import synthesize
from scripts.examples.synthetic.config import SynthesisConfig

__all__ = ["SynthesisConfig", "synthesize"]
