"""A client that is known by its API keys: what it may ask, and how much."""

from __future__ import annotations

import pytest

from host.access.clients import TokenBucket


def test_a_token_bucket_refills() -> None:
    clock = [0.0]
    bucket = TokenBucket(3, 2, lambda: clock[0])
    assert [bucket.consume() for _ in range(4)] == [True, True, True, False]
    clock[0] = 1.0
    assert [bucket.consume() for _ in range(3)] == [True, True, False]
    clock[0] = 1000.0
    assert [bucket.consume() for _ in range(4)] == [True, True, True, False]


def test_failures_do_not_delay_the_next_token() -> None:
    clock = [0.0]
    bucket = TokenBucket(1, 2, lambda: clock[0])
    assert bucket.consume()
    for eighth in range(4):
        clock[0] = eighth / 8
        assert not bucket.consume()
    assert bucket.seconds_until_token() == pytest.approx(0.125)
    clock[0] = 0.5
    assert bucket.consume()


def test_new_limits_keep_what_was_taken() -> None:
    clock = [0.0]
    bucket = TokenBucket(10, 1, lambda: clock[0])
    for _ in range(8):
        bucket.consume()
    bucket.set_limits(9, 1)
    assert [bucket.consume() for _ in range(2)] == [True, False]
    bucket.set_limits(20, 1)
    assert [bucket.consume() for _ in range(12)] == [True] * 11 + [False]


def test_tokens_that_are_given_back_do_not_exceed_the_capacity() -> None:
    clock = [0.0]
    bucket = TokenBucket(2, 1, lambda: clock[0])
    assert bucket.consume()
    bucket.give_back()
    assert [bucket.consume() for _ in range(3)] == [True, True, False]
    clock[0] = 2.0
    bucket.give_back(2)
    bucket.give_back()
    assert [bucket.consume() for _ in range(3)] == [True, True, False]
