"""Checkpoints that go on with another number of batches to an optimizer step.

Lightning counts batches of one rank. The same global batch is twice as many of them on half the data ranks.
"""

from __future__ import annotations

from typing import Any

_COUNTS = ("ready", "started", "processed", "completed")


def recount_batches(checkpoint: dict[str, Any], batches_per_step: int) -> None:
    """Rewrite the training loop's place in a checkpoint, in place, for `batches_per_step` batches to an optimizer step.

    The place is that of the last whole step; nothing is kept of one that was interrupted.
    """
    former = checkpoint.get("batches_per_step", batches_per_step)
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        ready = counts["ready"]
        steps, begun = divmod(ready, former)
        # A checkpoint may be written after a batch was processed, before it counts as completed: that difference stays.
        counts.update(
            {
                name: steps * batches_per_step + (0 if begun else counts[name] - ready)
                for name in _COUNTS
                if name in counts
            }
        )
