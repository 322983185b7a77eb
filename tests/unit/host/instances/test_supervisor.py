"""How much a lane gives its stub in advance."""

from __future__ import annotations

import pytest

from host.instances.supervisor import most_ahead


@pytest.mark.parametrize(
    ("spent", "calls"),
    [(0, 64), (60_000, 64), (100_000, 40), (499_999, 8), (2_000_001, 1), (10**10, 1)],
)
def test_a_stub_is_sent_what_it_does_in_four_milliseconds_and_64_calls_at_most(
    spent: int, calls: int
) -> None:
    assert most_ahead(spent) == calls
