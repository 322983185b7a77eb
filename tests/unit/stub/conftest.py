"""The fixture that starts real stubs as threads, for tests that play the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.stub.host_peer import StartStub, Stubs


@pytest.fixture
def start_stub(tmp_path: Path) -> Iterator[StartStub]:
    """Starts stubs; they end with the test."""
    stubs = Stubs(tmp_path)
    try:
        yield stubs.start
    finally:
        stubs.close()
