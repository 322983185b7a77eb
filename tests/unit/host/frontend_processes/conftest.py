"""Fixtures of the tests of frontend processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from host.frontend_processes import core_link
from tests.unit.host.frontend_processes.core_thread import CoreThread


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[CoreThread]:
    monkeypatch.setattr(core_link, "_ANSWER_SECONDS", 10.0)
    thread = CoreThread()
    yield thread
    thread.close()
