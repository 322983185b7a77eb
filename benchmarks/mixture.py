"""The loads of the memory benchmark: each kind of request that a host serves."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from tritonclient.utils import shared_memory as shm

from benchmarks.rows import IMAGE, MEGABYTES
from benchmarks.servers import RunningServer

SECONDS = 60.0  # timeout of a response

Steps = Generator[None, None, None]
"""Each step sends a few requests and checks the responses. Close the generator at the end."""

_STRINGS = np.array([b"%032d" % number for number in range(1000)], dtype=np.object_)


def _floats(elements: int) -> npt.NDArray[np.float32]:
    return np.arange(elements, dtype=np.float32)


def _check(answer: Any, array: npt.NDArray[Any]) -> None:
    if not np.array_equal(answer, array):
        raise SystemExit(f"wrong response to {array.dtype}{list(array.shape)}: {answer}")


def _grpc(model: str, array: npt.NDArray[Any]) -> Callable[[RunningServer], Steps]:
    def steps(server: RunningServer) -> Steps:
        with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            given = grpcclient.InferInput("INPUT0", array.shape, np_to_triton_dtype(array.dtype))
            given.set_data_from_numpy(array)
            while True:
                result = client.infer(model, [given], client_timeout=SECONDS)
                _check(result.as_numpy("OUTPUT0"), array)
                yield

    return steps


def _http(model: str, array: npt.NDArray[Any], binary: bool) -> Callable[[RunningServer], Steps]:
    def steps(server: RunningServer) -> Steps:
        with httpclient.InferenceServerClient(
            f"127.0.0.1:{server.http_port}", network_timeout=SECONDS
        ) as client:
            given = httpclient.InferInput("INPUT0", array.shape, np_to_triton_dtype(array.dtype))
            given.set_data_from_numpy(array, binary_data=binary)
            wanted = httpclient.InferRequestedOutput("OUTPUT0", binary_data=binary)
            while True:
                result = client.infer(model, [given], outputs=[wanted])
                _check(result.as_numpy("OUTPUT0"), array)
                yield

    return steps


def _shared_memory(model: str) -> Callable[[RunningServer], Steps]:
    """Sends tensors in shared memory, in regions that are registered again for each step."""

    def steps(server: RunningServer) -> Steps:
        array, name = _floats(MEGABYTES), f"pbhost-benchmark-{uuid.uuid4().hex}"
        region = shm.create_shared_memory_region(name, f"/{name}", 2 * array.nbytes)
        given = grpcclient.InferInput("INPUT0", array.shape, "FP32")
        given.set_shared_memory(name, array.nbytes)
        wanted = grpcclient.InferRequestedOutput("OUTPUT0")
        wanted.set_shared_memory(name, array.nbytes, array.nbytes)
        try:
            shm.set_shared_memory_region(region, [array])
            with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
                while True:
                    client.register_system_shared_memory(name, f"/{name}", 2 * array.nbytes)
                    client.infer(model, [given], outputs=[wanted], client_timeout=SECONDS)
                    client.unregister_system_shared_memory(name)
                    answer = shm.get_contents_as_numpy(
                        region, np.float32, array.shape, array.nbytes
                    )
                    _check(answer, array)
                    yield
        finally:
            shm.destroy_shared_memory_region(region)

    return steps


def _stream(count: int, cancelled_after: int = 0) -> Callable[[RunningServer], Steps]:
    """Opens a stream per step; reads all responses, or cancels it after `cancelled_after`."""

    def steps(server: RunningServer) -> Steps:
        given = grpcclient.InferInput("COUNT", [1], "INT32")
        given.set_data_from_numpy(np.array([count], dtype=np.int32))
        with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            while True:
                answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
                client.start_stream(lambda result, error, put=answers.put: put((result, error)))
                client.async_stream_infer("repeat", [given])
                for _ in range(cancelled_after or count):
                    _, error = answers.get(timeout=SECONDS)
                    if error is not None:
                        raise error
                client.stop_stream(cancel_requests=bool(cancelled_after))
                yield

    return steps


def _cancelled(server: RunningServer) -> Steps:
    """Sends requests and cancels them at once. Some are answered before they are cancelled."""
    array = _floats(IMAGE)
    given = grpcclient.InferInput("INPUT0", array.shape, "FP32").set_data_from_numpy(array)
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        while True:
            ends: queue.SimpleQueue[InferenceServerException | None] = queue.SimpleQueue()
            calls = [
                client.async_infer(
                    model,
                    [given],
                    lambda result, error, put=ends.put: put(error),
                    client_timeout=SECONDS,
                )
                for model in ("identity_fp32", "bls_identity", "ensemble_identity")
            ]
            for call in calls:
                call.cancel()
            for _ in calls:
                error = ends.get(timeout=SECONDS)
                if error is not None and "CANCELLED" not in str(error.status()):
                    raise error
            yield


MIXTURE: dict[str, Callable[[RunningServer], Steps]] = {
    "gRPC FP32[16]": _grpc("identity_fp32", _floats(16)),
    "gRPC FP32[16], dynamic batching": _grpc("identity_batched", _floats(16).reshape(1, 16)),
    "gRPC 602 kB": _grpc("identity_fp32", _floats(IMAGE)),
    "gRPC 1,000 strings": _grpc("identity_bytes", _STRINGS),
    "HTTP FP32[16], binary": _http("identity_fp32", _floats(16), binary=True),
    "HTTP FP32[16], JSON": _http("identity_fp32", _floats(16), binary=False),
    "HTTP 1,000 strings": _http("identity_bytes", _STRINGS, binary=True),
    "4 MB in system shared memory": _shared_memory("identity_fp32"),
    "BLS FP32[16]": _grpc("bls_identity", _floats(16)),
    "BLS 4 MB in system shared memory": _shared_memory("bls_identity"),
    "ensemble FP32[16]": _grpc("ensemble_identity", _floats(16)),
    "ensemble 602 kB": _grpc("ensemble_identity", _floats(IMAGE)),
    "streams of 1,000 responses": _stream(1000),
    "streams of 1,000, left after ten": _stream(1000, cancelled_after=10),
    "602 kB to three models, cancelled": _cancelled,
}
"""The steps of each client, by the name of the load."""
