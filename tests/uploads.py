"""Large requests whose client sends them part by part, over gRPC or HTTP/1.1."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from hyperframe.frame import DataFrame, RstStreamFrame
from tritonclient.grpc import service_pb2 as pb

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, wait_until
from tests.faults.hostile_http2 import HostileConnection

REFUSAL = b"Not enough memory to receive the request: it needs "
MODEL = "size"
_FRAME = 1 << 18  # bytes


def add_model(repository: RepositoryBuilder) -> None:
    """Adds the model `size`, whose output is the size of its input in bytes."""
    repository.add(
        MODEL,
        """
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                return [self.respond(request) for request in requests]

            def respond(self, request):
                array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
                size = pb_utils.Tensor("SIZE", np.array([array.nbytes]))
                return pb_utils.InferenceResponse([size])
        """,
        """
        input [{name: "INPUT0", data_type: TYPE_FP32, dims: [-1]}]
        output [{name: "SIZE", data_type: TYPE_INT64, dims: [1]}]
        instance_group [{count: 1, kind: KIND_CPU}]
        """,
    )


def wait_read(connection: socket.socket) -> None:
    """Waits until the other end of a TCP connection has read all that was sent to it."""
    port = f":{connection.getsockname()[1]:04X}"

    def read() -> bool:
        tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
        for line in "".join(tables).splitlines():
            _, local, remote, _, queues, *_ = line.split()
            unsent, unread = queues.split(":") if ":" in queues else ("0", "0")
            if local.endswith(port) and int(unsent, 16):
                return False
            if remote.endswith(port) and int(unread, 16):
                return False
        return True

    wait_until(read, "the server to read")


class GrpcUpload:
    """A ModelInfer over HTTP/2. Its tensor has `size` bytes."""

    def __init__(self, host: RunningHost, size: int, timeout: str = "") -> None:
        request = pb.ModelInferRequest(model_name=MODEL)
        request.inputs.add(name="INPUT0", datatype="FP32", shape=[size // 4])
        request.raw_input_contents.append(bytes(size))
        message: bytes = request.SerializeToString()
        self._data = memoryview(b"\0" + len(message).to_bytes(4, "big") + message)
        self._client = HostileConnection(host)
        opened = self._client.headers(more=[("grpc-timeout", timeout)] if timeout else [])
        self._stream = opened.stream_id
        self._client.send([opened])

    def send(self, size: int) -> None:
        """Sends the next bytes, and the end of the request after the last ones."""
        while size and self._data:
            part = self._data[: min(size, _FRAME)]
            size -= len(part)
            self._data = self._data[len(part) :]
            frame = DataFrame(self._stream, bytes(part))
            if not self._data:
                frame.flags.add("END_STREAM")
            self._client.send([frame])

    def wait_read(self) -> None:
        """Waits until the server has read everything that was sent."""
        wait_read(self._client.socket)

    def wait_for_status(self) -> int:
        """Waits for the end of the response; returns the status of gRPC."""
        known = {code: b"\x0bgrpc-status" + bytes([len(str(code))]) for code in range(17)}
        found: list[int] = []

        def ended() -> bool:
            found[:] = [
                code
                for code, name in known.items()
                if self._client.received(name + str(code).encode())
            ]
            return bool(found) or self._client.closed

        wait_until(ended, "the status of a call")
        assert found, "the server has closed the connection"
        return found[0]

    @property
    def refused(self) -> bool:
        """Whether the server has refused the request because of its memory."""
        return self._client.received(REFUSAL)

    def reset(self) -> None:
        """Resets the stream."""
        self._client.send([RstStreamFrame(self._stream, error_code=8)])

    def __enter__(self) -> GrpcUpload:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.__exit__(kind, error, trace)


class HttpUpload:
    """A request with a binary tensor of `size` bytes; `chunked`: without its length."""

    def __init__(self, host: RunningHost, size: int, chunked: bool = False) -> None:
        entry = {
            "name": "INPUT0",
            "datatype": "FP32",
            "shape": [size // 4],
            "parameters": {"binary_data_size": size},
        }
        head = json.dumps({"inputs": [entry]}).encode()
        length = len(head) + size
        framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % length
        self._chunked = chunked
        self._data = memoryview(head + bytes(size))
        port = int(host.http_url.rpartition(":")[2])
        self._socket = socket.create_connection(("127.0.0.1", port), DEADLINE)
        self._received = b""
        self._socket.sendall(
            b"POST /v2/models/size/infer HTTP/1.1\r\nhost: x\r\n"
            b"inference-header-content-length: %d\r\n%b\r\n\r\n" % (len(head), framing)
        )

    def send(self, size: int) -> None:
        """Sends the next bytes, and the end of the request after the last ones."""
        while size and self._data:
            part = self._data[: min(size, _FRAME)]
            size -= len(part)
            self._data = self._data[len(part) :]
            data = bytes(part)
            if self._chunked:
                end = b"" if self._data else b"0\r\n\r\n"
                data = b"%x\r\n%b\r\n%b" % (len(data), data, end)
            with suppress(ConnectionError):
                self._socket.sendall(data)

    def wait_read(self) -> None:
        """Waits until the server has read everything that was sent."""
        wait_read(self._socket)

    def wait_for_status(self) -> int:
        """Waits for the response; returns its status."""
        self._socket.settimeout(DEADLINE)
        while b"\r\n\r\n" not in self._received or len(self._received) < 300:
            data = self._socket.recv(1 << 16)
            self._received += data
            if not data or b"}" in data:
                break
        return int(self._received.split(b" ", 2)[1])

    @property
    def refused(self) -> bool:
        """Whether the server has refused the request because of its memory, as far as read."""
        return REFUSAL in self._received

    def reset(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def __enter__(self) -> HttpUpload:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
