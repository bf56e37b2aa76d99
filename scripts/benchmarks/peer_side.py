"""The other end of `peers.py`, in a process of its own: holds one step that is warmed up, and runs it whenever it is asked to.

It imports the standard library only, because it runs in environments that have neither torch nor evodsp. The conversation has a
JSON object a line: {"prepare": case, "first": S, "residues": R} is answered by {"ready": true} or {"absent": reason}, and each
{"run": 1} by {"seconds": wall time, "cpu_seconds": time of all threads}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Prepare = Callable[[str, int, int], Callable[[], None] | None]
"""(case, first size, residues) -> one forward and backward pass, or None if there is no counterpart."""


def serve(prepare: Prepare) -> int:
    """Answer until standard input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run: Callable[[], None] | None = None
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "prepare" in request:
            run = prepare(request["prepare"], request["first"], request["residues"])
            answer: dict[str, Any] = {"ready": True} if run else {"absent": "it has no such step here"}
            for _ in range(2 if run else 0):
                assert run is not None
                run()
        else:
            assert run is not None
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            answer = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps(answer), file=answers, flush=True)
    return 0
