"""Answers questions about tensors that say they are on a GPU (see `fake_cuda.py`). A line of standard input is a question, a
JSON list of a program's name and its arguments; each answer is a line of JSON.

A fork of this process answers, so that importing is done once and no question sees what an earlier one has left behind.

PYTHONPATH=../shared/fake_cuda:. python -m tests.builders.fake_cuda_process <<< '["pass", {"residues": 256, "ranks": 4}]'
"""

from __future__ import annotations

# isort: off
from tests.builders import fake_cuda_program  # before torch

# isort: on
import json
import os
import sys
import traceback

import torch
import torch._dynamo  # what the first operator of a process would import takes seconds
from torch import Tensor

from tests.builders import fake_cuda_features_program

PROGRAMS = {"pass": fake_cuda_program.answer, "features": fake_cuda_features_program.run}


def main() -> None:
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.is_bf16_supported = lambda *_: True
    Tensor.pin_memory = lambda x, *_: x  # type: ignore[method-assign, assignment]  # there is no page to lock
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # autocast refuses where no GPU is seen
    for line in sys.stdin:
        if not (process := os.fork()):
            _answer(line)
        if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
            print(json.dumps({"failed": f"exit code {code}"}), flush=True)


def _answer(line: str) -> None:
    program, arguments = json.loads(line)
    try:
        answer = PROGRAMS[program](**arguments)
    except Exception:
        answer = {"failed": traceback.format_exc()}
    print(json.dumps(answer), flush=True)
    os._exit(0)  # autograd's thread for the GPU that does not exist aborts a process that ends in the usual way


if __name__ == "__main__":
    main()
