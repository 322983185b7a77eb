"""The cache in the host's memory: its size, and the order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.cache.local import LocalStore
from host.cache.responses import CachedOutputs
from host.errors import ErrorCode, HostError
from host.inference.request import Tensor
from host.metrics.families import MetricsSnapshot

BESIDES = 512  # bytes of an entry with one tensor in addition to the tensor's data


def outputs(size: int, fill: bytes = b"x") -> CachedOutputs:
    return [Tensor("Y", "UINT8", [size], fill * size)]


def insert(store: LocalStore, key: bytes, size: int, fill: bytes = b"x") -> HostError | None:
    results: list[HostError | None] = []
    store.insert(key, outputs(size, fill), results.append)
    (result,) = results
    return result


def look_up(store: LocalStore, key: bytes) -> CachedOutputs | None:
    results: list[CachedOutputs | None] = []
    store.look_up(key, results.append)
    (result,) = results
    return result


def shown(store: LocalStore) -> dict[str, float]:
    snapshot = MetricsSnapshot()
    store.collect_into(snapshot)
    return {
        family.name: sample.value for family in snapshot.families() for sample in family.samples
    }


def test_an_inserted_response_is_found() -> None:
    store = LocalStore(10_000)
    assert look_up(store, b"a") is None
    assert insert(store, b"a", 3) is None
    assert look_up(store, b"a") == outputs(3)
    assert look_up(store, b"b") is None


def test_an_existing_entry_is_not_replaced() -> None:
    store = LocalStore(10_000)
    insert(store, b"a", 3)
    error = insert(store, b"a", 3, b"y")
    assert error is not None and error.code is ErrorCode.ALREADY_EXISTS
    assert look_up(store, b"a") == outputs(3)


def test_the_least_recently_used_entry_is_evicted() -> None:
    store = LocalStore(3 * (BESIDES + 100))
    for key in (b"a", b"b", b"c"):
        insert(store, key, 100)
    look_up(store, b"a")
    insert(store, b"d", 100)
    assert look_up(store, b"b") is None
    assert all(look_up(store, key) for key in (b"a", b"c", b"d"))
    assert shown(store)["nv_cache_num_evictions"] == 1


def test_as_many_entries_are_evicted_as_needed() -> None:
    store = LocalStore(3 * (BESIDES + 100))
    for key in (b"a", b"b", b"c"):
        insert(store, key, 100)
    insert(store, b"d", BESIDES + 200)  # needs the space of two
    assert [look_up(store, key) is not None for key in (b"a", b"b", b"c", b"d")] == [
        False, False, True, True,
    ]  # fmt: skip


def test_a_response_larger_than_the_cache_evicts_nothing() -> None:
    store = LocalStore(2000)
    insert(store, b"a", 100)
    error = insert(store, b"b", 2000)
    assert error is not None and (error.code, error.message) == (
        ErrorCode.INTERNAL,
        f"Requested byte_size: {2000 + BESIDES} is greater than total cache size: 2000",
    )
    assert look_up(store, b"a") is not None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2000)), max_size=50))
def test_the_cache_never_exceeds_its_size(steps: list[tuple[int, int]]) -> None:
    store = LocalStore(4000)
    for key, size in steps:
        insert(store, bytes([key]), size)
        assert 0 <= shown(store)["nv_cache_util"] <= 1
    there = sum(look_up(store, bytes([key])) is not None for key in range(10))
    assert shown(store)["nv_cache_num_entries"] == there


def test_the_cache_counts_lookups_hits_and_evictions() -> None:
    store = LocalStore(1024)
    look_up(store, b"a")
    insert(store, b"a", 0)
    look_up(store, b"a")
    seen = shown(store)
    assert seen["nv_cache_util"] == 0.5
    counts = ("entries", "hits", "misses", "lookups", "evictions")
    assert [seen[f"nv_cache_num_{name}"] for name in counts] == [1, 1, 1, 2, 0]
    assert seen["nv_cache_lookup_duration"] >= 0
    assert seen["nv_cache_insertion_duration"] >= 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "config didn't contain a valid 'size' field."),
        ({"size": "big"}, "'size' config must be a string or uint type"),
        ({"size": "-1"}, "'size' config must be a string or uint type"),
        ({"size": "9999999Ti"}, f"'size' is 9999999Ti, but a size in bytes is at most {2**63 - 1}"),
    ],
    ids=["none", "a word", "negative", "too large"],
)
def test_the_size_must_be_a_number_of_bytes(settings: dict[str, str], text: str) -> None:
    with pytest.raises(HostError) as caught:
        LocalStore.from_settings(settings)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == f"Failed to initialize LocalCache: {text}"


@pytest.mark.parametrize("size", ["9223372036854775807", "9007199254740991Ki"])
def test_the_size_may_have_63_bits(size: str) -> None:
    store = LocalStore.from_settings({"size": size})
    insert(store, b"a", 0)
    assert look_up(store, b"a") is not None
