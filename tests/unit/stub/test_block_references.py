"""Exported blocks: each export adds a reference, and each release removes one."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stub.wire.arena import Block, BlockReferences
from tests.conftest import DEADLINE


def block(dropped: list[tuple[str, int, int]], name: str, arena: int = 1, offset: int = 0) -> Block:
    """Returns a block that records when it is dropped."""
    data = memoryview(b"").toreadonly()
    return Block(arena, offset, 0, data, lambda *where: dropped.append((name, *where)))


def test_a_block_lives_until_it_is_released_as_often_as_it_was_exported() -> None:
    dropped: list[tuple[str, int, int]] = []
    references = BlockReferences()
    held = block(dropped, "a")
    for _ in range(3):
        references.export_block(held)
    del held
    assert len(references) == 3
    references.release_block(1, 0, 2)
    assert (len(references), dropped) == (1, [])
    references.release_block(1, 0, 1)
    assert (len(references), dropped) == (0, [("a", 1, 0)])


def test_the_latest_export_of_a_block_is_released_first() -> None:
    dropped: list[tuple[str, int, int]] = []
    references = BlockReferences()
    references.export_block(block(dropped, "first"))
    references.export_block(block(dropped, "second"))
    references.release_block(1, 0, 1)
    assert [name for name, *_ in dropped] == ["second"]
    references.release_block(1, 0, 1)
    assert [name for name, *_ in dropped] == ["second", "first"]


@pytest.mark.parametrize("where", [(2, 0), (1, 4096)])
def test_a_block_that_was_not_exported_cannot_be_released(where: tuple[int, int]) -> None:
    references = BlockReferences()
    references.export_block(block([], "a"))
    with pytest.raises(KeyError):
        references.release_block(*where, 1)
    with pytest.raises(KeyError):
        references.find_block(*where)


def test_too_many_releases_are_an_error_and_change_nothing() -> None:
    dropped: list[tuple[str, int, int]] = []
    references = BlockReferences()
    references.export_block(block(dropped, "a"))
    with pytest.raises(KeyError):
        references.release_block(1, 0, 2)
    assert (len(references), dropped) == (1, [])
    references.release_block(1, 0, 1)
    with pytest.raises(KeyError):
        references.release_block(1, 0, 1)


def test_release_all_drops_every_block() -> None:
    dropped: list[tuple[str, int, int]] = []
    references = BlockReferences()
    for offset in range(5):
        references.export_block(block(dropped, "x", offset=offset))
    references.release_all()
    assert (len(references), len(dropped)) == (0, 5)


def test_dropping_a_block_may_release_another_one() -> None:
    """Dropping a re-exported block releases its original, which calls back into the references."""
    references = BlockReferences()
    dropped: list[tuple[str, int, int]] = []
    references.export_block(block(dropped, "inner", offset=64))
    data = memoryview(b"").toreadonly()
    references.export_block(Block(1, 0, 0, data, lambda *_: references.release_block(1, 64, 1)))
    done = threading.Event()

    def release_block() -> None:
        references.release_block(1, 0, 1)
        done.set()

    thread = threading.Thread(target=release_block, daemon=True)
    thread.start()
    assert done.wait(DEADLINE), "the references deadlock"
    assert (len(references), dropped) == (0, [("inner", 1, 64)])


class BlockReferencesMachine(RuleBasedStateMachine):
    """Exports and releases blocks in any order, and compares the references with counts."""

    keys = st.tuples(st.integers(0, 1), st.integers(0, 2))

    def __init__(self) -> None:
        super().__init__()
        self.references = BlockReferences()
        self.dropped: list[tuple[str, int, int]] = []
        self.counts: dict[tuple[int, int], int] = {}
        self.exported = 0

    @rule(key=keys)
    def export_block(self, key: tuple[int, int]) -> None:
        self.references.export_block(block(self.dropped, "x", *key))
        self.counts[key] = self.counts.get(key, 0) + 1
        self.exported += 1

    @rule(key=keys, count=st.integers(1, 4))
    def release_block(self, key: tuple[int, int], count: int) -> None:
        if count > self.counts.get(key, 0):
            with pytest.raises(KeyError):
                self.references.release_block(*key, count)
        else:
            self.references.release_block(*key, count)
            self.counts[key] -= count

    @rule(key=keys)
    def find(self, key: tuple[int, int]) -> None:
        if self.counts.get(key, 0):
            found = self.references.find_block(*key)
            assert (found.arena, found.offset) == key
        else:
            with pytest.raises(KeyError):
                self.references.find_block(*key)

    @invariant()
    def what_is_held_lives(self) -> None:
        held = sum(self.counts.values())
        assert len(self.references) == held
        assert len(self.dropped) == self.exported - held


TestLedger = BlockReferencesMachine.TestCase
TestLedger.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
