"""A runtime for the tests of what needs one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pb_utils import _runtime
from tests.unit.pb_utils.recording import RecordingRuntime


@pytest.fixture
def runtime() -> Iterator[RecordingRuntime]:
    """Answer the API's calls within a test."""
    recorder = RecordingRuntime()
    with _runtime.use(recorder):
        yield recorder
