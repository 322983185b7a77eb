"""How many calls are prefetched to a stub."""

from __future__ import annotations

import pytest

from host.instances.supervisor import prefetch_limit


@pytest.mark.parametrize(
    ("batch_ns", "calls"),
    [(0, 64), (60_000, 64), (100_000, 40), (499_999, 8), (2_000_001, 1), (10**10, 1)],
)
def test_prefetch_is_limited_to_four_milliseconds_of_work_and_64_calls(
    batch_ns: int, calls: int
) -> None:
    assert prefetch_limit(batch_ns) == calls
