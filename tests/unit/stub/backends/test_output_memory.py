"""Outputs that ONNX Runtime writes into shared memory, and responses that refer to their parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pb_utils import _runtime
from stub.backends.batch import MIN_BYTES, allocate_output, block_of
from stub.backends.model_contract import ModelContract
from stub.backends.model_settings import Placement
from stub.memory import StubMemory
from stub.wire.arena import Arena, Block, create_arena_file
from tests.lazy_import import lazy_import

onnxruntime = lazy_import("onnxruntime", "onnx")

from tests.integration.test_backend_onnx import WIDE, save_wide  # noqa: E402

LIMIT = 1 << 24


class ArenaRuntime(_runtime.Runtime):
    """A runtime with shared memory and without a host."""

    def __init__(self) -> None:
        self.arena = Arena(7, create_arena_file("test", LIMIT), LIMIT)
        self.memory = StubMemory(self.arena, lambda: None)

    def allocate_output(self, size: int) -> tuple[Block, memoryview]:
        views: list[memoryview] = []
        return self.memory.own.write_with(size, views.append), views[0]


@pytest.fixture
def arena() -> Iterator[Arena]:
    runtime = ArenaRuntime()
    with _runtime.use(runtime):
        yield runtime.arena
    runtime.arena.close()


def bound(folder: Path, **options: Any) -> Any:
    """Returns a session of the wide model, which integration tests also use."""
    from stub.backends.onnxruntime import onnx_session
    from stub.backends.onnxruntime.model import BoundSession

    save_wide(folder, **options)
    opened = onnxruntime.InferenceSession(folder / "1" / "model.onnx")
    inputs, outputs = onnx_session.model_tensors("wide", opened)
    contract = ModelContract({"name": "wide", "max_batch_size": 8})
    arguments = {"model_instance_name": "wide", "model_instance_kind": "CPU"}
    placement = Placement({**arguments, "model_instance_device_id": "0"})
    return BoundSession(opened, inputs, outputs, contract, placement)


X = np.array([[1], [2]], np.float32)
MANY = X * np.arange(WIDE, dtype=np.float32)


def test_a_large_output_is_written_into_shared_memory(tmp_path: Path, arena: Arena) -> None:
    results = bound(tmp_path).run(["FEW", "MANY"], {"X": X}, None)
    np.testing.assert_array_equal(results["FEW"], -X)
    assert block_of(results["FEW"]) is None
    part = block_of(results["MANY"][1:2])
    assert part is not None
    assert (part.arena, part.size) == (arena.number, 4 * WIDE)
    np.testing.assert_array_equal(np.frombuffer(part.data, np.float32), MANY[1])
    assert arena.used >= MANY.nbytes


def test_a_part_keeps_the_whole_block_alive(arena: Arena) -> None:
    array = allocate_output(np.dtype(np.uint8), [2, MIN_BYTES])
    assert array is not None
    part = block_of(array[1:])
    del array
    assert part is not None
    arena.trim()
    assert arena.used > 0
    del part
    arena.trim()
    assert arena.used == 0


def test_an_output_that_is_longer_than_declared_is_copied(tmp_path: Path, arena: Arena) -> None:
    results = bound(tmp_path, misnamed=True).run(["MANY"], {"X": X}, None)
    np.testing.assert_array_equal(results["MANY"], np.concatenate([MANY, MANY]))
    assert block_of(results["MANY"]) is None


def test_an_output_is_copied_when_the_arena_is_full(tmp_path: Path, arena: Arena) -> None:
    full = allocate_output(np.dtype(np.uint8), [LIMIT - (1 << 18)])
    assert full is not None
    results = bound(tmp_path).run(["MANY"], {"X": X}, None)
    np.testing.assert_array_equal(results["MANY"], MANY)
    assert block_of(results["MANY"]) is None
