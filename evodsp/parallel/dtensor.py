"""Which tensors are sharded by PyTorch (FSDP2)."""

from __future__ import annotations

import sys
from typing import Any

_MODULE = "torch.distributed.tensor"


def is_dtensor(x: Any) -> bool:
    """Whether `x` is one of PyTorch's sharded tensors.

    Their module takes half a second to import. Where nothing has imported it, there is none.
    """
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(x, module.DTensor)
