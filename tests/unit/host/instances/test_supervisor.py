"""How many calls are prefetched to a stub."""

from __future__ import annotations

import pytest

from host.instances.supervisor import prefetch_limit, reclaimable_limit


@pytest.mark.parametrize(
    ("batch_ns", "calls"),
    [(0, 64), (60_000, 64), (100_000, 40), (499_999, 8), (2_000_001, 1), (10**10, 1)],
)
def test_prefetch_is_limited_to_four_milliseconds_of_work_and_64_calls(
    batch_ns: int, calls: int
) -> None:
    assert prefetch_limit(batch_ns) == calls


@pytest.mark.parametrize(
    ("mean_ns", "finds_core", "calls"),
    [
        (0, True, 10),
        (25_000, True, 5),
        (99_999, True, 2),
        (0, False, 64),
        (99_999, False, 32),
        (100_000, True, 0),
        (100_000, False, 0),
    ],
)
def test_prefetch_of_one_of_several_instances_is_limited_to_what_starts_soon(
    mean_ns: float, finds_core: bool, calls: int
) -> None:
    """250 µs of work with 25 µs more for each call, or 4 ms if no other instance finds a core."""
    assert reclaimable_limit(mean_ns, finds_core) == calls
