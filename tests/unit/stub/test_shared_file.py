"""Unnamed files as shared memory."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stub.wire import shared_file
from stub.wire.shared_file import PAGE, Mapping, create_shared_file
from tests.conftest import DEADLINE
from tests.descriptors import descriptors


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = create_shared_file("pbhost-test", 8 * PAGE)
    yield descriptor
    os.close(descriptor)


def test_a_file_that_cannot_get_its_size_leaves_no_descriptor() -> None:
    before = descriptors()
    with pytest.raises(OSError, match="Invalid argument"):
        create_shared_file("pbhost-test", -1)
    assert not descriptors() - before


@pytest.mark.parametrize("size", [0, PAGE, 9 * PAGE])
def test_size_is_sealed(fd: int, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(fd, size)
    code = "import os, sys; os.truncate(sys.argv[1], int(sys.argv[2]))"
    path = f"/proc/{os.getpid()}/fd/{fd}"
    child = subprocess.run(
        [sys.executable, "-c", code, path, str(size)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert "PermissionError" in child.stderr
    assert os.fstat(fd).st_size == 8 * PAGE


def test_a_shared_file_is_not_inherited_and_has_no_name(fd: int) -> None:
    assert not os.get_inheritable(fd)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert os.readlink(f"/proc/self/fd/{fd}") == "/memfd:pbhost-test (deleted)"


def test_a_shared_file_is_zeroed_and_uses_no_memory_at_first(fd: int) -> None:
    assert os.fstat(fd).st_blocks == 0
    assert Mapping(fd, 8 * PAGE, writable=False).view == bytes(8 * PAGE)


def test_two_mappings_show_the_same_bytes_and_one_can_be_read_only(fd: int) -> None:
    writable, readable = Mapping(fd, 8 * PAGE, True), Mapping(fd, 8 * PAGE, False)
    writable.view[100:103] = b"abc"
    assert bytes(readable.view[100:103]) == b"abc"
    with pytest.raises(TypeError):
        readable.view[0] = 1


def test_a_view_outlives_the_descriptor_and_the_mapping() -> None:
    fd = create_shared_file("pbhost-test", PAGE)
    view = Mapping(fd, PAGE, True).view[10:20]
    os.close(fd)
    view[:] = b"0123456789"
    assert bytes(view) == b"0123456789"


def test_punched_page_reads_as_zero_and_takes_no_memory(fd: int) -> None:
    mapping = Mapping(fd, 8 * PAGE, True)
    mapping.view[:] = b"x" * (8 * PAGE)
    assert os.fstat(fd).st_blocks * 512 == 8 * PAGE
    mapping.punch_hole(PAGE, 2 * PAGE)
    assert os.fstat(fd).st_blocks * 512 == 6 * PAGE
    assert mapping.view == b"x" * PAGE + bytes(2 * PAGE) + b"x" * (5 * PAGE)


def test_without_memfd_the_name_is_unlinked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    fd = create_shared_file("pbhost-test", 2 * PAGE)
    try:
        assert not list(Path("/dev/shm").glob("pbhost-test*"))
        assert os.fstat(fd).st_size == 2 * PAGE
        view = Mapping(fd, 2 * PAGE, True).view
        view[:3] = b"abc"
        assert bytes(Mapping(fd, 2 * PAGE, False).view[:3]) == b"abc"
    finally:
        os.close(fd)
    assert shared_file.PAGE == os.sysconf("SC_PAGESIZE")
