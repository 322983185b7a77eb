"""Arrays over other memory, and copies of large arrays."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pb_utils import _storage
from pb_utils._storage import copy_array, copy_into
from tests.conftest import DEADLINE

LARGE = 1 << 20


def pattern(size: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3 * LARGE) | st.integers(LARGE - 2, LARGE + 2), st.integers(0, 64))
def test_exactly_the_given_bytes_are_copied(size: int, start: int) -> None:
    source = pattern(start + size)[start:]
    room = np.zeros(start + size + 1, np.uint8)
    copy_into(room[start : start + size].data, source.data)
    np.testing.assert_array_equal(room[start : start + size], source)
    assert not room[:start].any()
    assert not room[start + size]


@pytest.mark.parametrize("kind", [np.bool_, np.float16, np.int64, np.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 1 << 17, 2)])
def test_a_copy_has_dtype_and_shape_and_its_own_memory(
    kind: type[np.generic], shape: tuple[int, ...]
) -> None:
    array = (np.arange(np.prod(shape)) % 2).astype(kind).reshape(shape)
    array.flags.writeable = False
    copy = copy_array(array)
    assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
    assert copy.flags.c_contiguous
    assert copy.flags.writeable
    assert not np.shares_memory(copy, array)
    np.testing.assert_array_equal(copy, array)


@pytest.mark.parametrize("size", [10, 2 * LARGE])
def test_different_sizes_are_rejected(size: int) -> None:
    with pytest.raises(ValueError, match="different"):
        copy_into(memoryview(bytearray(size + 1)), memoryview(bytes(size)))


def test_many_threads_copy_at_the_same_time() -> None:
    arrays = [pattern(4 * LARGE, seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        for array, copy in zip(arrays * 8, pool.map(copy_array, arrays * 8), strict=True):
            np.testing.assert_array_equal(copy, array)


def is_copied(seed: int) -> bool:
    array = pattern(4 * LARGE, seed)
    return np.array_equal(copy_array(array), array)


def test_helper_thread_copies_only_while_a_core_is_free() -> None:
    array = pattern(4 * LARGE)
    asked: list[bool] = []

    def is_free() -> bool:
        asked.append(len(asked) % 2 == 0)
        return asked[-1]

    before = _storage._core_is_free
    _storage.set_core_is_free(is_free)
    try:
        copy_array(pattern(LARGE - 1))
        assert asked == []
        for _ in range(4):
            np.testing.assert_array_equal(copy_array(array), array)
            room = bytearray(array.nbytes)
            copy_into(memoryview(room), array.data)
            assert room == array.tobytes()
    finally:
        _storage.set_core_is_free(before)
    assert asked == [True, False] * 4


def test_a_large_array_is_copied_although_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_storage, "_copy_thread", None)
    monkeypatch.setattr(threading.Thread, "start", start)
    source = np.arange(1 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    _storage._copy_with_two_threads(target, source)
    np.testing.assert_array_equal(target, source)


@pytest.mark.unmeasured
def test_a_forked_child_copies_too() -> None:
    assert is_copied(0)  # this process has started its helper thread
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(is_copied, range(4)).get(DEADLINE) == [True] * 4
