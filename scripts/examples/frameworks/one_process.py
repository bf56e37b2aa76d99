"""Training in one process.

    python -m scripts.examples.frameworks.one_process

The other programs of this folder reproduce its losses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .model import MAX_NORM, STEPS, batch, new_model
from .ranks import Result, show


def train(clip: bool = True) -> Result:
    """Train on whole batches. `clip`: clip the gradient's norm, as the frameworks do that can."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


if __name__ == "__main__":
    show(train()[0])
