"""Clients' memory as the host has it: copied, never touched."""

from __future__ import annotations

import asyncio
import os
import struct
import uuid
from collections.abc import Iterator

import numpy as np
import posix_ipc
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from host.errors import ErrorCode, HostError
from host.inference.call import Call
from host.inference.request import InferRequest, Tensor, copy_from_shared_memory, read_bytes
from host.inference.validation import Signature
from host.instances.arenas import Arenas
from host.instances.regions import RegionBlock, Regions, write_outputs
from stub.wire.shared_file import PAGE

SHAPED = """
    name: "m"
    max_batch_size: 4
    input { name: "N" data_type: TYPE_INT32 dims: [ 2 ] is_shape_tensor: true }
    input { name: "A" data_type: TYPE_INT8 dims: [ -1 ] }
"""


class Client:
    """Its object has one page before the registered ones, and is registered as `r`."""

    def __init__(self, regions: Regions, key: str) -> None:
        self.regions = regions
        memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=3 * PAGE)
        self.fd = memory.fd
        regions.register("r", key, PAGE, 2 * PAGE)

    def write(self, data: bytes, offset: int = 0) -> RegionBlock:
        os.pwrite(self.fd, data, PAGE + offset)
        return self.regions.find_block("r", offset, len(data))

    def cut(self, size: int = 0) -> None:
        """Shrinks the region to this size."""
        os.ftruncate(self.fd, PAGE + size)


@pytest.fixture
def client() -> Iterator[Client]:
    async def make() -> Arenas:
        return Arenas(64 * PAGE)

    arenas = asyncio.run(make())
    key = f"/test-{uuid.uuid4().hex}"
    client = Client(Regions(arenas), key)
    yield client
    client.regions.close()
    arenas.close()
    os.close(client.fd)
    posix_ipc.unlink_shared_memory(key)


def tensor_in_region(block: RegionBlock, name: str = "A") -> Tensor:
    return Tensor(name, "INT8", [1, block.size], block, block)


def test_client_memory_is_not_a_python_buffer(client: Client) -> None:
    block = client.write(b"here")
    with pytest.raises(TypeError, match="bytes-like"):
        memoryview(block)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match="bytes-like"):
        np.frombuffer(block, np.int8)  # type: ignore[call-overload]  # wrong on purpose
    assert not block.data


def test_copy_is_independent_of_client_memory(client: Client) -> None:
    tensor = tensor_in_region(client.write(b"here", 100))
    copy = copy_from_shared_memory(tensor)
    client.write(b"gone", 100)
    assert (copy.name, copy.datatype, copy.shape) == ("A", "INT8", [1, 4])
    assert (copy.data, copy.owner, copy_from_shared_memory(copy)) == (b"here", None, copy)
    assert read_bytes(tensor.data) == b"gone"


@pytest.mark.parametrize("left", [0, 102, PAGE])
def test_truncated_region_is_an_error(client: Client, left: int) -> None:
    offset = PAGE - 2
    block = client.write(b"here", offset)
    client.cut(left)
    with pytest.raises(HostError) as caught:
        bytes(block)
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message == (
        f"shared memory region 'r' has become too small: it has {max(0, left - offset)} of the 4"
        f" bytes at offset {offset} that a tensor needs. Make it as large as it was when it was"
        " registered, or register it again"
    )


def test_memory_of_a_server_that_has_ended_is_neither_read_nor_written(client: Client) -> None:
    block = client.write(b"here")
    client.regions.close()
    with pytest.raises(HostError, match="region 'r' cannot be read: Bad file descriptor"):
        bytes(block)
    error = write_outputs({"O": block}, [Tensor("O", "INT8", [1], b"x")])
    assert error is not None
    assert error.message == "output 'O' cannot be written: Bad file descriptor"


def test_shape_tensors_are_compared_by_their_value_on_arrival(client: Client) -> None:
    signature = Signature(text_format.Parse(SHAPED, model_config_pb2.ModelConfig()))
    other = Tensor("A", "INT8", [1, 1], b"x")
    calls = []
    for third in (5, 5, 6):
        block = client.write(struct.pack("<3i", 1, 4, third))
        asked = InferRequest("m", [Tensor("N", "INT32", [3], block, block), other])
        signature.validate_request(asked)
        calls.append(Call(asked))
    client.cut()
    assert signature.can_share_batch(calls[0], calls[1])
    assert not signature.can_share_batch(calls[0], calls[2])
    block = client.regions.find_block("r", 0, 12)
    with pytest.raises(HostError, match="has become too small"):
        signature.validate_request(
            InferRequest("m", [Tensor("N", "INT32", [3], block, block), other])
        )
