"""A fixture with the runtime of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pb_utils import _runtime
from tests.unit.pb_utils.recording import RecordingRuntime


@pytest.fixture
def runtime() -> Iterator[RecordingRuntime]:
    """Makes a recording runtime the current one during a test."""
    recorder = RecordingRuntime()
    with _runtime.use(recorder):
        yield recorder
