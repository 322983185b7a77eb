"""The operations of the micro benchmarks can run."""

from __future__ import annotations

import pytest

from benchmarks.micro import OPERATIONS


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_can_be_repeated(name: str) -> None:
    operation = OPERATIONS[name]()
    for _ in range(100):
        operation()
