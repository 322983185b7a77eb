"""When a changed key file is read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from host.access import api_keys
from host.access.api_keys import ApiKeys
from host.errors import HostError


class Clock:
    """In place of the module `time`: stands still between changes of `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def test_a_file_that_is_still_being_written_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(api_keys, "time", clock)
    path = tmp_path / "keys"

    def write(text: str) -> None:
        path.write_text(text)
        os.utime(path, (clock.now, clock.now))

    def is_known(key: str) -> bool:
        try:
            keys.authorize("inference", f"Bearer {key}")
        except HostError:
            return False
        return True

    write("alice first-key\n")
    keys = ApiKeys(str(path), ["inference"], frozenset({"inference"}))
    clock.now += 10
    write("alice first-key\nbob second-k")  # a valid key, but only half of one
    assert is_known("first-key") and not is_known("second-k")
    clock.now += 1.1
    write("alice first-key\nbob second-key\n")
    assert is_known("first-key")
    assert not is_known("second-k") and not is_known("second-key")
    clock.now += 1.1
    assert is_known("first-key") and is_known("second-key") and not is_known("second-k")
