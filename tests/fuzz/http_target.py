"""An HTTP connection and the codec of inference requests behind it, fed with any bytes.

The first byte of an input says how the rest is cut; the second whether it is a conversation, or the
JSON part of an inference request and what follows it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from host.errors import HostError
from host.frontends.compression import decompress
from host.frontends.http.infer_endpoint import to_request
from host.frontends.http.inference_header import InferenceHeaderReader
from host.frontends.http.routes import find_route
from host.frontends.http1.asgi import Message, Receive, Send
from host.frontends.http1.http1_connection import Http1Connection, Timeouts
from host.frontends.receive_memory import ReceiveBudget, ReservedBytes
from host.instances.busy_polling import no_connection_hook
from host.instances.regions import Regions
from tests.memory_transport import MemoryTransport

MOST = 1 << 16
_TIMEOUTS = Timeouts(max_header_bytes=4096)
_REGIONS = Regions(None)


class _Log(logging.Handler):
    """Whatever the endpoint says about itself is a finding."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def decode(body: bytes, begin: int) -> None:
    """Takes a body apart whose JSON part has this length."""
    head = InferenceHeaderReader(MOST).read(body[:begin])
    request = to_request(head, "m", 1, body, begin, _REGIONS)
    assert all(tensor.name is not None for tensor in request.inputs)


async def _app(scope: Message, receive: Receive, send: Send) -> None:
    """Handles a request of the endpoint, without models."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    headers = dict(scope["headers"])
    status = 200
    try:
        if find_route(scope["raw_path"]) is None:
            status = 404
        if headers.get(b"content-encoding") in (b"gzip", b"deflate"):
            body = await decompress(body, MOST, ReservedBytes(ReceiveBudget()))
        length = headers.get(b"inference-header-content-length", b"")
        decode(body, min(int(length), len(body)) if length.isdigit() else len(body))
    except HostError:
        status = 400
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


async def _converse(size: int, data: bytes) -> None:
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
    connections: set[Any] = set()
    tasks: set[asyncio.Task[None]] = set()
    made = Http1Connection(_app, _TIMEOUTS, connections, tasks, no_connection_hook())
    sink = MemoryTransport(peername=("127.0.0.1", 1), sockname=("127.0.0.1", 2))
    made.connection_made(sink)
    for at in range(0, len(data), size):
        made.data_received(data[at : at + size])
        assert len(made._parser._head.headers) <= _TIMEOUTS.max_header_bytes, "headers without end"
        if sink.closed:
            break
        if at < 64 * size:
            await asyncio.sleep(0)
    for _ in range(4):
        await asyncio.sleep(0)
    assert not sink.data or sink.data.startswith(b"HTTP/1.1 "), bytes(sink.data[:40])
    made.connection_lost(None)
    for _ in range(4):
        await asyncio.sleep(0)
    assert not problems, problems
    assert not connections and not tasks


_JSON = {
    "id": "a",
    "parameters": {"sequence_id": 7, "priority": 1, "binary_data_output": True},
    "inputs": [
        {"name": "A", "datatype": "INT32", "shape": [1, 2], "data": [[1, -2]]},
        {"name": "B", "datatype": "BYTES", "shape": [1], "data": ["x\u00e9"]},
        {"name": "C", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
    ],
    "outputs": [{"name": "O", "parameters": {"binary_data": True, "classification": 2}}],
}
_TEXT = json.dumps(_JSON).encode()
_HEAD = b"POST /v2/models/m/versions/1/infer HTTP/1.1\r\nhost: x\r\n"
SEEDS = [
    b"\0\1" + _TEXT + bytes(4),
    b"\0\1" + b'{"inputs":[{"name":"A","datatype":"FP64","shape":[2],"data":[1e3,0.5]}]}',
    b"\0\0" + b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n" * 2,
    b"\7\0"
    + _HEAD
    + b"inference-header-content-length: %d\r\n" % len(_TEXT)
    + b"content-length: %d\r\n\r\n" % (len(_TEXT) + 4)
    + _TEXT
    + bytes(4),
    b"\0\0" + _HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\na: b\r\n\r\n",
    b"\3\0" + _HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
    b"\0\0" + _HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}",
    b"\0\0" + _HEAD + b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\n\x1f\x8b\x08",
]


def check(data: bytes, run: Callable[..., None] = asyncio.run) -> None:
    """The endpoint raises nothing but HostError, says nothing into the log, and keeps nothing."""
    if len(data) < 2:
        return
    cut, how, rest = data[0], data[1], data[2:]
    if how & 1:
        end = rest.rfind(b"}") + 1 if how & 2 else len(rest) - cut
        try:
            decode(rest, max(0, end))
        except HostError:
            pass
        return
    log, host_log = _Log(), logging.getLogger("pbhost")
    host_log.addHandler(log)
    try:
        run(_converse(cut or max(len(rest), 1), rest))
    finally:
        host_log.removeHandler(log)
    assert not log.lines, log.lines
