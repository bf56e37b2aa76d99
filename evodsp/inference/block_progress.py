"""Progress of a prediction on standard error: a pass through a long protein takes minutes, a result several passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from evodsp.model.alphafold import AlphaFold
from evodsp.progress import progress


@contextmanager
def block_progress(model: AlphaFold, what: str, passes: int) -> Iterator[None]:
    """Count the blocks of the extra-MSA stack and the Evoformer that the model runs within this context.

    `passes`: how many passes there are at most. On a GPU the count runs ahead of the device within a pass: blocks are launched,
    not awaited.
    """
    blocks = [*model.extra_msa_stack.blocks, *model.evoformer.blocks]
    with progress(f"{what}: blocks of {passes} pass{'es' * (passes > 1)}", total=passes * len(blocks)) as advance:
        hooks = [block.pair_stack.register_forward_hook(lambda *_: advance(1)) for block in blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
