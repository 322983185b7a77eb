"""What a peer holds: each telling counts, and each return gives back one."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stub.wire.arena import Block, BlockReferences
from tests.conftest import DEADLINE


def block(dropped: list[tuple[str, int, int]], name: str, arena: int = 1, offset: int = 0) -> Block:
    """A holding that notes when it is dropped."""
    data = memoryview(b"").toreadonly()
    return Block(arena, offset, 0, data, lambda *where: dropped.append((name, *where)))


def test_a_block_lives_until_it_is_returned_as_often_as_it_was_lent() -> None:
    dropped: list[tuple[str, int, int]] = []
    ledger = BlockReferences()
    held = block(dropped, "a")
    for _ in range(3):
        ledger.export_block(held)
    del held
    assert len(ledger) == 3
    ledger.release_block(1, 0, 2)
    assert (len(ledger), dropped) == (1, [])
    ledger.release_block(1, 0, 1)
    assert (len(ledger), dropped) == (0, [("a", 1, 0)])


def test_the_latest_holding_of_a_block_goes_first() -> None:
    dropped: list[tuple[str, int, int]] = []
    ledger = BlockReferences()
    ledger.export_block(block(dropped, "first"))
    ledger.export_block(block(dropped, "second"))
    ledger.release_block(1, 0, 1)
    assert [name for name, *_ in dropped] == ["second"]
    ledger.release_block(1, 0, 1)
    assert [name for name, *_ in dropped] == ["second", "first"]


@pytest.mark.parametrize("where", [(2, 0), (1, 4096)])
def test_what_was_not_lent_cannot_be_returned(where: tuple[int, int]) -> None:
    ledger = BlockReferences()
    ledger.export_block(block([], "a"))
    with pytest.raises(KeyError):
        ledger.release_block(*where, 1)
    with pytest.raises(KeyError):
        ledger.find_block(*where)


def test_too_many_returns_are_an_error_and_change_nothing() -> None:
    dropped: list[tuple[str, int, int]] = []
    ledger = BlockReferences()
    ledger.export_block(block(dropped, "a"))
    with pytest.raises(KeyError):
        ledger.release_block(1, 0, 2)
    assert (len(ledger), dropped) == (1, [])
    ledger.release_block(1, 0, 1)
    with pytest.raises(KeyError):
        ledger.release_block(1, 0, 1)


def test_clearing_drops_everything() -> None:
    dropped: list[tuple[str, int, int]] = []
    ledger = BlockReferences()
    for offset in range(5):
        ledger.export_block(block(dropped, "x", offset=offset))
    ledger.release_all()
    assert (len(ledger), len(dropped)) == (0, 5)


def test_dropping_a_block_may_return_another_one() -> None:
    """A block that is passed on holds a loan elsewhere, whose end comes back to the ledger."""
    ledger = BlockReferences()
    dropped: list[tuple[str, int, int]] = []
    ledger.export_block(block(dropped, "inner", offset=64))
    data = memoryview(b"").toreadonly()
    ledger.export_block(Block(1, 0, 0, data, lambda *_: ledger.release_block(1, 64, 1)))
    done = threading.Event()

    def give_back() -> None:
        ledger.release_block(1, 0, 1)
        done.set()

    thread = threading.Thread(target=give_back, daemon=True)
    thread.start()
    assert done.wait(DEADLINE), "the ledger waits for itself"
    assert (len(ledger), dropped) == (0, [("inner", 1, 64)])


class LedgerMachine(RuleBasedStateMachine):
    """Lending and returning in any order against counts."""

    keys = st.tuples(st.integers(0, 1), st.integers(0, 2))

    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockReferences()
        self.dropped: list[tuple[str, int, int]] = []
        self.counts: dict[tuple[int, int], int] = {}
        self.lent = 0

    @rule(key=keys)
    def lend(self, key: tuple[int, int]) -> None:
        self.ledger.export_block(block(self.dropped, "x", *key))
        self.counts[key] = self.counts.get(key, 0) + 1
        self.lent += 1

    @rule(key=keys, count=st.integers(1, 4))
    def give_back(self, key: tuple[int, int], count: int) -> None:
        if count > self.counts.get(key, 0):
            with pytest.raises(KeyError):
                self.ledger.release_block(*key, count)
        else:
            self.ledger.release_block(*key, count)
            self.counts[key] -= count

    @rule(key=keys)
    def find(self, key: tuple[int, int]) -> None:
        if self.counts.get(key, 0):
            found = self.ledger.find_block(*key)
            assert (found.arena, found.offset) == key
        else:
            with pytest.raises(KeyError):
                self.ledger.find_block(*key)

    @invariant()
    def what_is_held_lives(self) -> None:
        held = sum(self.counts.values())
        assert len(self.ledger) == held
        assert len(self.dropped) == self.lent - held


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
