"""A store with chains that disturb whoever reads them. Workers import this module, so it imports no Lightning."""

from __future__ import annotations

import os
import signal
import time

from evodsp.data.records import Alignment, ProteinSequence
from evodsp.data.sources.chain_files import ChainFiles

SLEEPER, KILLER = "9slp_A", "9kil_A"


class PlantedStore(ChainFiles):
    """A store in which one chain never answers and another one kills the process that reads it."""

    def alignments(self, key: str, query: ProteinSequence | None = None) -> list[Alignment]:
        if key == SLEEPER:
            time.sleep(1000)
        if key == KILLER:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().alignments(key, query)
