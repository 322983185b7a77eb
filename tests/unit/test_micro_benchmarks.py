"""The parts that are measured by themselves do something."""

from __future__ import annotations

import pytest

from benchmarks.micro import OPERATIONS


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_can_be_repeated(name: str) -> None:
    operation = OPERATIONS[name]()
    for _ in range(100):
        operation()
