"""When a changed key file is read again."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from host.access import api_keys
from host.access.api_keys import DEFAULT_CATEGORIES, ApiKeys, read_key_file
from host.access.clients import Permissions, SharedCapacity
from host.errors import HostError
from host.options.validators import CATEGORIES


def test_a_line_gives_name_key_and_permissions(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    digest = hashlib.sha256(b"fourth-key").hexdigest()
    path.write_text(
        "# comment\n\nfirst-key\nalice second-key rate=0.5\n"
        "bob third=key== models=a*,b rate=20 burst=5 concurrency=3 allow=inference,trace\n"
        f"bob sha256:{digest}\nops fifth-key allow=all\n"
    )
    clients = read_key_file(path, CATEGORIES)
    unnamed = hashlib.sha256(b"first-key").hexdigest()[:8]
    assert list(clients) == [unnamed, "alice", "bob", "ops"]
    assert clients[unnamed].permissions == Permissions(DEFAULT_CATEGORIES)
    assert clients["alice"].permissions == Permissions(DEFAULT_CATEGORIES, (), 0.5, 1)
    assert clients["bob"].permissions == Permissions(
        frozenset(("inference", "trace")), ("a*", "b"), 20.0, 5, 3
    )
    keys = [b"third=key==", b"fourth-key"]
    assert clients["bob"].hashes == [hashlib.sha256(key).digest() for key in keys]
    assert clients["ops"].permissions.categories == CATEGORIES


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# none\n", "it has no key"),
        ("short\n", "line 1: the key has less than 8 characters"),
        ("a the-secret rate=0\n", "line 1: rate must be a number above 0, got '0'"),
        ("a the-secret rate=nan\n", "line 1: rate must be a number above 0, got 'nan'"),
        ("a the-secret burst=1.5\n", "line 1: burst must be a whole number above 0, got '1.5'"),
        ("a the-secret concurrency=\n", "line 1: concurrency must be a whole number above 0"),
        ("a the-secret models=x,,y\n", "line 1: models: a name is empty"),
        ("a the-secret allow=health,infer\n", "line 1: allow: unknown category 'infer'; known are"),
        ("a the-secret rate=1 rate=2\n", "line 1: option 'rate' is given twice"),
        ("a the-secret model=x\n", "line 1: expected [NAME] KEY [OPTION=VALUE ...]; did you mean"),
        ("a b the-secret\n", "line 1: expected [NAME] KEY [OPTION=VALUE ...]. Options are allow"),
        ("sha256:abc\n", "line 1: a hash is sha256: and 64 hexadecimal digits"),
        ("a the-secret\nb the-secret\n", "line 2: line 1 has the same key"),
        ("a key-the-1 rate=1\na key-the-2 rate=2\n", "line 2: line 1 has the options of client"),
    ],
)
def test_an_error_names_the_line_and_not_the_key(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_key_file(path, CATEGORIES)
    assert str(caught.value).startswith(complaint)
    assert "secret" not in str(caught.value)


def test_clients_share_what_is_too_much_for_all() -> None:
    capacity = SharedCapacity(8)
    capacity.in_progress, capacity.active_clients = 7, 1
    assert capacity.has_room(7)
    capacity.in_progress = 8
    assert not capacity.has_room(8)
    assert capacity.has_room(0)  # a second client
    capacity.in_progress, capacity.active_clients = 12, 2
    assert capacity.has_room(3)
    assert not capacity.has_room(4)
    assert SharedCapacity().has_room(1 << 40)


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
