"""What making the features of a sample would launch and move on a GPU, counted without one. Limits lie at what was counted."""

from __future__ import annotations

from tests.builders.fake_cuda import measure_features


def test_features_of_one_sample() -> None:
    """Catches launches for each sequence or cluster, a table that is copied from the host for each sample, and a
    size that is read from the device, for which the host waits."""
    sizes = {"columns": 40, "crop": 32, "clusters": 12, "extra": 20}
    one, four = (measure_features(rows=90, cycles=cycles, **sizes) for cycles in (1, 4))
    assert (one.host, four.host) == ({}, {})
    assert one.launches <= 516
    assert four.launches <= 736
    deeper = measure_features(rows=180, cycles=4, **sizes)
    assert deeper.launches == four.launches
