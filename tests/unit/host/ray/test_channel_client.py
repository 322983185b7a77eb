"""The client's end of a connection to a replica of another deployment."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from host.errors import ErrorCode, HostError
from host.frontends.grpc.methods import ResponseCallback
from host.frontends.inference_core import Cancellable
from host.frontends.request_headers import Header
from host.inference.request import InferRequest, InferResponse, Tensor
from host.ray import channel_server
from host.ray.channel_client import Channel, ChannelLostError, NotTakenError
from host.ray.channel_messages import (
    RESPONSE_WINDOW,
    FrameKind,
    Refusal,
    ReplicaMethod,
    encode_contents,
    encode_frame,
    encode_message,
    encode_result,
    pack_request,
    unpack_response,
)
from host.ray.channel_server import (
    ANSWER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    SECRET_BYTES,
    ChannelAddress,
    ChannelServer,
    Methods,
    accept_client,
    answer_client,
    answer_server,
    greet_server,
)
from host.remote_models import WINDOW_BYTES
from tests.conftest import DEADLINE

SECRET = bytes(SECRET_BYTES)
Responses = AsyncGenerator[tuple[InferResponse | None, bool], None]


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, DEADLINE))


class Model:
    """Answers with its inputs, as many times as the parameter `count` says."""

    def __init__(self) -> None:
        self.sent = 0
        self.began, self.cancelled = asyncio.Event(), asyncio.Event()

    async def hang(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def infer(self, request: InferRequest, headers: Mapping[str, str]) -> Responses:
        self.began.set()
        if request.id == "refused":
            raise HostError(ErrorCode.NOT_FOUND, "there is no such model")
        if request.id == "hangs":
            await self.hang()
        count = int(request.parameters.get("count", 1))
        for number in range(1, count + 1):
            self.sent = number
            parameters: dict[str, Any] = {"number": number, **headers}
            yield (
                InferResponse("model", 1, request.id, request.inputs, parameters),
                number == count,
            )

    def start_infer(
        self, message: bytes, metadata: Sequence[Header], done: ResponseCallback
    ) -> Cancellable:
        """Answers with the message and the metadata; at once, later, or never."""
        self.began.set()
        if message == b"refused":
            raise HostError(ErrorCode.NOT_FOUND, "there is no such model")
        answer = message + repr(metadata).encode()
        if message == b"hangs":
            return asyncio.ensure_future(self.hang())
        if message == b"later":
            return asyncio.get_running_loop().call_soon(done, answer)
        done(HostError(ErrorCode.UNAVAILABLE, "it fails") if message == b"fails" else answer)
        return asyncio.get_running_loop().call_soon(lambda: None)


@dataclass
class Change:
    """What is sent: containers within dataclasses."""

    name: str
    files: dict[str, Any]
    stamp: tuple[int, str] | None = None


ADD = ReplicaMethod[int]("add", tuple[int, int], int)
ADD_TEXT = ReplicaMethod[int]("add", tuple[str, int], int)
ADD_AS_TEXT = ReplicaMethod[str]("add", tuple[int, int], str)
FAIL = ReplicaMethod[None]("fail", tuple[()], None)
HANG = ReplicaMethod[None]("hang", tuple[()], None)
MAKE_FUNCTION = ReplicaMethod[Any]("make_function", tuple[()], Any)
MISSING = ReplicaMethod[None]("missing", tuple[()], None)
REFUSE = ReplicaMethod[None]("refuse", tuple[()], None)
SEND_BACK = ReplicaMethod[list[Change]]("send_back", tuple[list[Change]], list[Change])


async def add(left: int, right: int) -> int:
    return left + right


async def send_back(changes: list[Change]) -> list[Change]:
    return changes


async def make_function() -> object:
    return lambda: None


async def refuse() -> None:
    raise HostError(ErrorCode.NOT_FOUND, "there is no such model")


async def fail() -> None:
    raise ValueError("it has failed")


@asynccontextmanager
async def connected(model: Model) -> AsyncGenerator[tuple[ChannelServer, Channel], None]:
    methods: Methods = {
        ADD: add,
        FAIL: fail,
        HANG: model.hang,
        MAKE_FUNCTION: make_function,
        REFUSE: refuse,
        SEND_BACK: send_back,
    }
    server = ChannelServer(model.infer, model.start_infer, methods)
    channel = await Channel.connect(await server.start("127.0.0.1"))
    try:
        yield server, channel
    finally:
        channel.close()
        await server.close()


def request(id: str = "", **parameters: Any) -> InferRequest:
    tensors = [Tensor("A", "UINT8", [3], b"abc"), Tensor("B", "BYTES", [0], b"")]
    return InferRequest("model", tensors, id=id, parameters=parameters, correlation_id="text")


async def ask(channel: Channel, sent: InferRequest, refused: bool = False) -> list[Any]:
    """The responses. Raises an error that is the answer, unless it is expected."""
    head, *buffers = pack_request(sent, {"traceparent": "00-1-2-01"})
    found = []
    async with aclosing(channel.infer(head, buffers)) as answers:
        async for answer in answers:
            if isinstance(answer, Refusal):
                if refused:
                    break
                raise answer.to_error()
            found.append(unpack_response((answer[0], answer[1], *answer[2])))
    return found


def test_requests_and_responses_are_whole() -> None:
    async def case() -> None:
        async with connected(Model()) as (_, channel):
            found = await asyncio.gather(*(ask(channel, request(str(n))) for n in range(20)))
        for number, [(response, final)] in enumerate(found):
            assert final and response.id == str(number)
            assert response.parameters == {"number": 1, "traceparent": "00-1-2-01"}
            assert [(t.name, t.shape, bytes(t.data)) for t in response.outputs] == [
                ("A", [3], b"abc"),
                ("B", [0], b""),
            ]

    run(case())


def test_responses_come_in_order_and_wait_for_a_slow_reader() -> None:
    async def case() -> None:
        model = Model()
        async with connected(model) as (_, channel):
            head, *buffers = pack_request(request(count=1000), {})
            async with aclosing(channel.infer(head, buffers)) as answers:
                await anext(answers)
                for _ in range(3 * RESPONSE_WINDOW):  # turns in which it could send all
                    await ask(channel, request("refused"), refused=True)
                assert model.sent <= RESPONSE_WINDOW + 1
                numbers = [unpack_response((a[0], a[1], *a[2]))[0] async for a in answers]  # type: ignore[index]
            assert [one.parameters["number"] for one in numbers if one] == list(range(2, 1001))

    run(case())


def test_large_responses_wait_for_a_slow_reader() -> None:
    async def case() -> None:
        model = Model()
        async with connected(model) as (_, channel):
            count, most = RESPONSE_WINDOW - 1, WINDOW_BYTES >> 20
            large = Tensor("A", "UINT8", [1 << 20], bytes(1 << 20))
            sent = InferRequest("model", [large], parameters={"count": count})
            head, *buffers = pack_request(sent, {})
            async with aclosing(channel.infer(head, buffers)) as answers:
                for asked in range(1, count + 1):  # which acknowledges the one before
                    await anext(answers)
                    for _ in range(3):  # turns in which it could send more
                        await ask(channel, request("refused"), refused=True)
                    assert model.sent <= asked - 1 + most
                assert model.sent == count

    run(case())


def test_an_error_has_its_code() -> None:
    async def case() -> None:
        async with connected(Model()) as (_, channel):
            with pytest.raises(HostError, match="no such model") as caught:
                await ask(channel, request("refused"))
            assert caught.value.code is ErrorCode.NOT_FOUND

    run(case())


def test_an_error_of_a_later_version_is_an_unknown_one() -> None:
    error = Refusal("Out of range", "the index is 7").to_error()
    assert error.code is ErrorCode.UNKNOWN
    assert error.message == "Out of range: the index is 7"


def test_a_request_that_is_given_up_is_cancelled() -> None:
    async def case() -> None:
        model = Model()
        async with connected(model) as (server, channel):
            asked = asyncio.ensure_future(ask(channel, request("hangs")))
            await model.began.wait()
            assert server.ongoing == channel.in_progress == 1
            asked.cancel()
            await model.cancelled.wait()
            assert channel.in_progress == 0

    run(case())


def test_requests_in_progress_end_with_the_connection() -> None:
    async def case() -> None:
        model = Model()
        async with connected(model) as (server, channel):
            asked = asyncio.ensure_future(ask(channel, request("hangs")))
            await model.began.wait()
            await server.close()
            with pytest.raises(ChannelLostError):
                await asked
            assert not channel.accepts and model.cancelled.is_set()
            with pytest.raises(NotTakenError):
                await ask(channel, request())

    run(case())


def test_a_server_that_stops_takes_no_new_request_and_ends_those_in_progress() -> None:
    async def case() -> None:
        model = Model()
        async with connected(model) as (server, channel):
            head, *buffers = pack_request(request(count=100), {})
            async with aclosing(channel.infer(head, buffers)) as answers:
                await anext(answers)
                server.say_goodbye()
                with pytest.raises(NotTakenError):
                    await ask(channel, request())
                assert len([one async for one in answers]) == 99
            assert not channel.accepts

    run(case())


def test_a_request_that_never_reached_the_server_may_be_sent_to_another_one() -> None:
    async def case() -> None:
        async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await accept_client(reader, writer, SECRET)
            await reader.readexactly(1)  # the beginning of the request
            writer.close()

        server = await asyncio.start_server(end, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        channel = await Channel.connect(ChannelAddress("127.0.0.1", port, SECRET))
        with pytest.raises(NotTakenError):
            await ask(channel, request())
        server.close()

    run(case())


def test_a_request_whose_connection_is_reset_is_not_sent_again() -> None:
    """What the server has said last, that it has taken the request, may be lost then."""

    def serve(listener: socket.socket, reset: threading.Event) -> None:
        connection, _ = listener.accept()
        nonce = connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
        connection.sendall(answer_client(SECRET, nonce))
        connection.recv(PROOF_BYTES + 1, socket.MSG_WAITALL)  # and the beginning of the request
        connection.sendall(encode_frame(FrameKind.TAKEN, 1))
        linger = struct.pack("ii", 1, 0)  # as the kernel ends a process that has not read all
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
        reset.set()

    async def case() -> None:
        reset = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=serve, args=(listener, reset))
            thread.start()
            port = listener.getsockname()[1]
            channel = await Channel.connect(ChannelAddress("127.0.0.1", port, SECRET))
            asked = asyncio.ensure_future(ask(channel, request()))
            await asyncio.sleep(0)  # it sends the request
            assert reset.wait(DEADLINE)  # and reads nothing meanwhile
            later = [asyncio.ensure_future(ask(channel, request())) for _ in range(2)]
            for one in (asked, *later):
                with pytest.raises(ChannelLostError):
                    await one
            thread.join()

    run(case())


def test_a_request_begins_when_the_client_can_know_it() -> None:
    async def case() -> None:
        model = Model()
        server = ChannelServer(model.infer, model.start_infer, {})
        address = await server.start("127.0.0.1")
        with socket.create_connection((address.host, address.port)) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            large = Tensor("A", "UINT8", [32 << 20], bytes(32 << 20))  # more than the kernel holds
            head, *buffers = pack_request(InferRequest("model", [large]), {})
            nonce = bytes(NONCE_BYTES)
            await loop.sock_sendall(client, nonce)
            answer = await loop.sock_recv(client, ANSWER_BYTES)
            await loop.sock_sendall(client, answer_server(address.secret, nonce, answer))
            await loop.sock_sendall(client, encode_message(FrameKind.REQUEST, 1, head, buffers))
            await model.began.wait()
            model.began.clear()
            head, *buffers = pack_request(request(), {})
            await loop.sock_sendall(client, encode_message(FrameKind.REQUEST, 2, head, buffers))
            for _ in range(100):
                await asyncio.sleep(0)
            assert server.ongoing == 1  # the first one has ended, its response is on its way
            assert not model.began.is_set()
            while not model.began.is_set():
                await loop.sock_recv(client, 1 << 20)
        await server.close()

    run(case())


def test_a_call_that_cannot_be_encoded_or_decoded_is_answered() -> None:
    async def case() -> None:
        async with connected(Model()) as (server, channel):
            with pytest.raises(HostError, match="'make_function': TypeError: .*function"):
                await channel.call(MAKE_FUNCTION)
            with pytest.raises(HostError, match="'add': ValidationError: Expected `int`"):
                await channel.call(ADD_TEXT, "1", 1)
            with pytest.raises(HostError, match="result of 'add' cannot be decoded"):
                await channel.call(ADD_AS_TEXT, 1, 2)
            with pytest.raises(TypeError, match="function"):
                await channel.call(ADD, lambda: None, 1)
            assert channel.in_progress == 0
            assert await channel.call(ADD, 1, 2) == 3

    run(case())


def test_both_ends_notice_a_machine_that_is_gone() -> None:
    async def case() -> None:
        async with connected(Model()) as (server, channel):
            assert await channel.call(ADD, 1, 2) == 3
            for writer in (channel._writer, *(one._writer for one in server._connections)):
                connection = writer.get_extra_info("socket")
                for level, option in (
                    (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
                ):
                    assert connection.getsockopt(level, option) > 0

    run(case())


def test_a_client_that_does_not_know_the_secret_is_not_served() -> None:
    async def case() -> None:
        model = Model()
        server = ChannelServer(model.infer, model.start_infer, {})
        address = await server.start("127.0.0.1")
        with pytest.raises(PermissionError, match="does not know the secret"):
            await Channel.connect(ChannelAddress(address.host, address.port, SECRET))
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(bytes(NONCE_BYTES))
        await reader.readexactly(ANSWER_BYTES)
        head, *buffers = pack_request(request(), {})
        writer.write(bytes(PROOF_BYTES) + encode_message(FrameKind.REQUEST, 1, head, buffers))
        assert not await reader.read()
        assert not model.began.is_set()
        writer.close()
        await server.close()

    run(case())


def test_clients_that_never_prove_the_secret_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel_server, "_MAX_HANDSHAKES", 2)

    async def greet_halfway(address: ChannelAddress) -> tuple[Any, Any]:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(bytes(NONCE_BYTES))
        await reader.readexactly(ANSWER_BYTES)
        return reader, writer

    async def case() -> None:
        model = Model()
        server = ChannelServer(model.infer, model.start_infer, {ADD: add})
        address = await server.start("127.0.0.1")
        held = [await greet_halfway(address) for _ in range(2)]
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await Channel.connect(address)
        reader, writer = held[0]
        writer.write_eof()
        assert not await reader.read()  # the server has noticed
        channel = await Channel.connect(address)
        assert await channel.call(ADD, 1, 2) == 3
        channel.close()
        for _, writer in held:
            writer.close()
        await server.close()

    run(case())
    (warning,) = [one.getMessage() for one in caplog.records]
    assert "closes new connections: 2 clients have not proved" in warning


def test_a_client_reads_nothing_of_a_server_that_does_not_know_the_secret() -> None:
    """The port of a replica that has ended may belong to any process."""

    async def case() -> None:
        async def repeat_proof(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(NONCE_BYTES)
            writer.write(other + encode_result(1, 3))
            assert not await reader.read()
            writer.close()
            ended.set()

        other, ended = answer_client(SECRET, bytes(NONCE_BYTES)), asyncio.Event()
        server = await asyncio.start_server(repeat_proof, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PermissionError, match="does not know the secret"):
            await Channel.connect(ChannelAddress("127.0.0.1", port, SECRET))
        await ended.wait()
        server.close()

    run(case())


def test_rpcs_are_answered_as_the_replica_answers_them() -> None:
    async def case() -> None:
        async with connected(Model()) as (server, channel):
            metadata: list[Header] = [("key", "value"), ("key-bin", b"\xff")]
            for message in (b"at once", b"later"):
                answer = await channel.answer_rpc(message, metadata)
                assert answer == message + repr(metadata).encode()
            for message, code in ((b"refused", "NOT_FOUND"), (b"fails", "UNAVAILABLE")):
                with pytest.raises(HostError) as caught:
                    await channel.answer_rpc(message, ())
                assert caught.value.code.name == code
            assert server.ongoing == channel.in_progress == 0

    run(case())


def test_an_rpc_that_is_given_up_is_cancelled() -> None:
    async def case() -> None:
        model = Model()
        async with connected(model) as (server, channel):
            asked = asyncio.ensure_future(channel.answer_rpc(b"hangs", ()))
            await model.began.wait()
            await channel.answer_rpc(b"at once", ())  # the other one has begun by now
            assert server.ongoing == 1
            asked.cancel()
            await model.cancelled.wait()
            assert server.ongoing == channel.in_progress == 0

    run(case())


def test_methods_are_called_by_name() -> None:
    async def case() -> None:
        async with connected(Model()) as (server, channel):
            assert await channel.call(ADD, 2, 3) == 5
            sent = [Change("a", {"config": "{}", "file": b"\xff"}, (1, "b")), Change("c", {})]
            assert await channel.call(SEND_BACK, sent) == sent
            for method, text in ((FAIL, "ValueError: it has failed"), (MISSING, "KeyError")):
                with pytest.raises(HostError, match=text) as caught:
                    await channel.call(method)
                assert caught.value.code is ErrorCode.UNAVAILABLE
            with pytest.raises(HostError, match="no such model") as caught:
                await channel.call(REFUSE)
            assert caught.value.code is ErrorCode.NOT_FOUND

    run(case())


def test_a_call_that_is_given_up_is_cancelled_and_counts_as_no_request() -> None:
    async def case() -> None:
        model = Model()
        async with connected(model) as (server, channel):
            called = asyncio.ensure_future(channel.call(HANG))
            await model.began.wait()
            assert server.ongoing == 0
            called.cancel()
            await model.cancelled.wait()

    run(case())


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param(b"\x91\x92\xa1\xff\xa1v", id="a text that is not UTF-8"),
        pytest.param(b"\x91\x92\xa1k" + b"\x91" * 10_000 + b"\xc0", id="deep lists"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="a list without its members"),
    ],
)
def test_an_rpc_that_cannot_be_decoded_is_answered_and_loses_no_other(metadata: bytes) -> None:
    async def case() -> None:
        async with connected(Model()) as (server, channel):
            broken = struct.pack("<I", len(metadata)) + metadata + b"message"
            number = channel._next_number()
            refused = asyncio.ensure_future(
                channel._ask(number, encode_contents(FrameKind.RPC, number, broken))
            )
            await asyncio.sleep(0)  # it is sent, and the other one comes with it
            assert await channel.answer_rpc(b"at once", ()) == b"at once[]"
            with pytest.raises(HostError, match="cannot be decoded") as caught:
                await refused
            assert caught.value.code is ErrorCode.INTERNAL
            assert server.ongoing == channel.in_progress == 0

    run(case())


@pytest.mark.parametrize(
    "result",
    [b"\xa1\xff", b"\x91" * 10_000 + b"\xc0", b"\xc1"],
    ids=["a text that is not UTF-8", "deep lists", "no value"],
)
def test_a_result_that_cannot_be_decoded_fails_its_call_alone(result: bytes) -> None:
    async def case() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await accept_client(reader, writer, SECRET)
            await reader.readexactly(1)  # the beginning of the call
            writer.write(encode_contents(FrameKind.RESULT, 1, result))
            while await reader.read(1 << 16):
                pass  # until the client has gone
            writer.close()
            ended.set()

        ended = asyncio.Event()
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        channel = await Channel.connect(ChannelAddress("127.0.0.1", port, SECRET))
        with pytest.raises(HostError, match="'make_function' cannot be decoded"):
            await channel.call(MAKE_FUNCTION)
        assert channel.accepts
        channel.close()
        await ended.wait()
        server.close()

    run(case())


def test_a_server_that_stops_during_a_handshake_says_so_after_it() -> None:
    """Before, the client would take it for a proof that is wrong."""

    async def case() -> None:
        server = ChannelServer(Model().infer, Model().start_infer, {})
        address = await server.start("127.0.0.1")
        reader, writer = await asyncio.open_connection(address.host, address.port)
        for _ in range(100):
            await asyncio.sleep(0)
            if server._connections:
                break
        server.say_goodbye()
        await greet_server(reader, writer, address.secret)
        goodbye = encode_frame(FrameKind.GOODBYE, 0)
        assert await reader.readexactly(len(goodbye)) == goodbye
        writer.close()
        await server.close()

    run(case())
