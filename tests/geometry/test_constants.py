"""Tables of the geometry on a device: copied once, and usable wherever they are asked for."""

from __future__ import annotations

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from evodsp.geometry.frames import Constant, structure_labels
from tests.builders.host_waits import HostWaits


def test_a_table_is_copied_to_a_device_once() -> None:
    """Catches a copy per use: each makes the host wait until the GPU has finished all that was launched before."""
    aatype, positions, mask = torch.zeros(5).long(), torch.zeros(5, 37, 3), torch.zeros(5, 37)
    arguments = [x.to("meta") for x in (aatype, positions, mask)]
    structure_labels(*arguments)
    with HostWaits() as seen:
        structure_labels(*arguments)
    assert seen.waits == []


def test_the_counter_sees_a_copy() -> None:
    """Catches a counter that would call any program free of waits."""
    with HostWaits() as seen:
        Constant(np.arange(3.0)).like(torch.zeros(2, device="meta"))
        torch.zeros(2, device="meta").tolist()
        float(torch.zeros(1, device="meta"))
        torch.zeros(2, device="meta").cpu()
        torch.zeros(2, device="meta")[torch.tensor([1])]
        torch.zeros(2).to("meta", non_blocking=True)
        torch.zeros(2, device="meta")[..., [1, 0]]
        torch.zeros(2, device="meta").new_tensor([1.0])
    found = [wait.split()[0] for wait in seen.waits]
    assert found[:5] == ["_to_copy", "_to_copy", "_local_scalar_dense", "_to_copy", "index"]
    assert found[5:] == ["_to_copy", "__getitem__", "new_tensor"]


def test_devices_and_dtypes_do_not_mix() -> None:
    """Catches a copy that is found again for another dtype or device."""
    table = Constant(np.array([1.5, 2.5]))
    for dtype in (torch.float64, torch.float32, torch.int64):
        assert table.on(torch.device("cpu"), dtype).dtype == dtype
        assert table.on(torch.device("meta"), dtype).device.type == "meta"
    torch.testing.assert_close(table.like(torch.zeros(1, dtype=torch.float64)), torch.tensor([1.5, 2.5]).double())


def test_a_table_first_used_in_inference_can_be_trained_with() -> None:
    """Catches "Inference tensors cannot be saved for backward" in a process that predicts first and trains later."""
    table, x = Constant(np.array([1.5, 2.5])), torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        table.like(x)
    (table.like(x) * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.5, 2.5]


def test_a_fake_copy_is_not_kept() -> None:
    """Catches shapes without numbers that a tool such as a memory estimate leaves behind for the run itself."""
    table = Constant(np.array([1.5, 2.5]))
    for _ in range(2):
        with FakeTensorMode() as mode:
            mode.from_tensor(torch.zeros(2)) + table.like(mode.from_tensor(torch.zeros(2)))
    assert table.like(torch.zeros(1)).tolist() == [1.5, 2.5]
