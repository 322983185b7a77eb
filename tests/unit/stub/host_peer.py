"""A peer that speaks the host's side of the wire to a stub, which runs as threads of this process.

The stub is real: its worker, executor, channel, rings and arenas. The peer writes and reads frames
with the codec of `stub.wire`.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zmq

import pb_utils
from pb_utils._datatypes import CODES
from stub.thread_worker import ThreadWorker
from stub.wire import messages as m
from stub.wire.arena import Arena, ArenaReader, Block, create_arena_file
from stub.wire.messages import WireRequest, WireResponse, WireTensor
from stub.wire.ring import (
    BLS_RING,
    HOST_RING,
    WORK_RING,
    RingReader,
    RingWriter,
    create_ring_file,
    map_ring,
)
from stub.wire.spawn import SpawnArguments
from tests.conftest import DEADLINE

ARENA_LIMIT = 1 << 23
HOST_ARENA, STUB_ARENA = 0, 1
LARGE = 1 << 18
"""Elements of an array that is sent in shared memory."""

INSTANCE = "m_0"
FAILED = f"Failed to process the request(s) for model '{INSTANCE}', message: "
"""The beginning of the error of a failed batch."""

Message = TypeVar("Message", bound=m.ToHost)
Execute = Callable[[list[pb_utils.InferenceRequest]], Any]


class Model:
    """A model whose `execute` is a function of the test."""

    def __init__(self, execute: Execute) -> None:
        self.execute = execute

    def provide(self) -> Model:
        """Called while the stub initializes the instance: bound functions have no `initialize`."""
        return self

    def is_ready(self) -> bool:
        """Always ready: `HostPeer.drain_service_messages` uses it."""
        return True


class HostPeer:
    """The host's end of one stub."""

    def __init__(self, endpoint: str, model: Model) -> None:
        self.model = model
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.RCVTIMEO, int(DEADLINE * 1000))
        self._router.bind(endpoint)
        rings = create_ring_file("rings", 3)
        stub_arena = create_arena_file("pbhost-test-stub", ARENA_LIMIT)
        host_arena = create_arena_file("pbhost-test-host", ARENA_LIMIT)
        lifeline, self._lifeline = os.pipe2(os.O_CLOEXEC)
        self._work_event, self._host_event = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
        self._bls_event = os.eventfd(0, os.EFD_NONBLOCK)
        self._stub_ended = os.eventfd(0)
        self._ring = RingWriter(map_ring(rings, WORK_RING))
        self._inbox = RingReader(map_ring(rings, HOST_RING), self._host_event)
        self._bls_ring = RingWriter(map_ring(rings, BLS_RING))
        self.set_log_levels(0b1111)
        self._arena = Arena(HOST_ARENA, host_arena, ARENA_LIMIT)
        self._outputs = ArenaReader(stub_arena, ARENA_LIMIT)
        self._inputs: list[Block] = []
        self._received: list[m.ToHost] = []
        self._batches = self._checks = 0
        self._host_ended = False
        self._own = [
            self._work_event,
            self._host_event,
            self._bls_event,
            self._stub_ended,
            host_arena,
        ]
        spawn = SpawnArguments(
            endpoint,
            "t",
            "title",
            lifeline,
            rings,
            os.dup(self._work_event),
            os.dup(self._host_event),
            os.dup(self._bls_event),
            STUB_ARENA,
            stub_arena,
            ARENA_LIMIT,
            os.dup(host_arena),
            ARENA_LIMIT,
        )  # the stub closes these descriptors
        self._thread = threading.Thread(target=self._run_stub, args=(spawn, model), daemon=True)
        self._thread.start()
        _, frame = self._router.recv_multipart()  # the service socket exists after this
        assert m.decode_to_host(frame) == [m.Hello()]

    def _run_stub(self, spawn: SpawnArguments, model: Model) -> None:
        try:
            worker = ThreadWorker(spawn, lambda name: model.provide())
            self.worker = weakref.ref(worker)
            worker.run()
        finally:
            os.eventfd_write(self._stub_ended, 1)

    def initialize(self, **options: Any) -> None:
        """Makes the stub an instance of the model; `options` are fields of `Initialize`."""
        source = m.ModelSource("/models/m", 1, "model.py")
        args = {"model_name": "m", "model_config": "{}"}
        self.send_work(m.Initialize(INSTANCE, source, args, ["OUT"], **options))
        self._runs_coroutines = self.receive(m.Initialized).runs_coroutines

    def send_work(self, *messages: m.ToStub) -> None:
        """Sends one frame to the thread that runs batches."""
        assert self._ring.try_write(m.encode(messages))
        os.eventfd_write(self._work_event, 1)

    def send_service(self, *messages: m.ToStub) -> None:
        """Sends one frame to the service thread."""
        self._router.send_multipart([b"t", m.encode(messages)])

    def send_bls(self, *messages: m.ToStub) -> None:
        """Sends one frame by the ring of BLS responses, as fast as the stub reads it."""
        end = time.monotonic() + DEADLINE
        records = self._bls_ring.write(m.encode(messages))
        while True:
            os.eventfd_write(self._bls_event, records)
            if not self._bls_ring.unsent:
                return
            assert time.monotonic() < end, "the stub does not read its ring"
            os.sched_yield()
            records = self._bls_ring.flush()

    def drain_service_messages(self) -> None:
        """Returns when the service thread has handled all messages that were sent to it."""
        self._checks += 1
        self.send_service(m.CheckReady(self._checks))
        assert self.receive(m.ReadinessResult) == m.ReadinessResult(self._checks, True, "")

    def receive_frame(self) -> list[m.ToHost]:
        """Waits for the next frame and returns it, without looking at those received before."""
        while (received := self._inbox.read_frame()) is None:
            self._wait_for_records()
        return m.decode_to_host(received)

    def _wait_for_records(self) -> None:
        poller = select.poll()
        poller.register(self._host_event, select.POLLIN)
        poller.register(self._stub_ended, select.POLLIN)
        ready = dict(poller.poll(int(DEADLINE * 1000)))
        assert self._host_event in ready, f"no message after {self._received}"
        self._inbox.receive_announcements()

    def receive(self, kind: type[Message]) -> Message:
        """Returns the next message of a kind; messages of other kinds wait for their own call."""
        while True:
            for index, message in enumerate(self._received):
                if isinstance(message, kind):
                    del self._received[index]
                    return message
            self._received += self.receive_frame()

    def received(self, kind: type[Message]) -> list[Message]:
        """Returns all messages of a kind that arrived before a message that was waited for."""
        found: list[Message] = [one for one in self._received if isinstance(one, kind)]
        self._received = [message for message in self._received if not isinstance(message, kind)]
        return found

    def send_batch(self, *requests: WireRequest) -> int:
        """Sends a batch; returns its number."""
        self._batches += 1
        self.send_work(m.Execute(self._batches, list(requests)))
        return self._batches

    def run_batch(self, *requests: WireRequest) -> tuple[list[m.Response], m.BatchDone]:
        """Runs a batch; returns the responses up to its end, and its end."""
        number = self.send_batch(*requests)
        done = self.receive(m.BatchDone)
        assert done.batch == number
        return self.received(m.Response), done

    def export(self, array: npt.NDArray[np.int32], name: str = "IN") -> WireTensor:
        """Writes an array to the host's arena; returns the tensor that refers to it."""
        block = self._arena.write(memoryview(array.tobytes()))
        self._inputs.append(block)
        shape = list(array.shape)
        return WireTensor(name, CODES["INT32"], shape, None, HOST_ARENA, block.offset, block.size)

    def array(self, tensor: WireTensor) -> npt.NDArray[np.int32]:
        """Returns a tensor of the stub; it shares the memory of the stub's arena."""
        data: bytes | memoryview | None = tensor.data
        if data is None:
            assert tensor.arena == STUB_ARENA
            data = self._outputs.slice(tensor.offset, tensor.size)
        return np.frombuffer(data, np.int32).reshape(tensor.shape)

    def finalize(self) -> m.Finalized:
        """Ends the stub as an unload does."""
        (self.send_service if self._runs_coroutines else self.send_work)(m.Finalize())
        return self.receive(m.Finalized)

    def set_log_levels(self, levels: int) -> None:
        """Tells the stub which levels of log lines are written; level n is bit n."""
        self._ring.set_flags(levels)

    def end_host(self) -> None:
        """Closes the lifeline, as the end of a host does."""
        if not self._host_ended:
            self._host_ended = True
            os.close(self._lifeline)

    def wait_for_end(self) -> None:
        """Waits until the stub has ended."""
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()

    def close(self) -> None:
        """Ends the stub as the end of a host does, and waits for it."""
        self.end_host()
        self.wait_for_end()
        self._router.close(0)
        self._context.term()
        for descriptor in self._own:
            os.close(descriptor)


StartStub = Callable[..., HostPeer]
"""Starts a stub: `start_stub(execute, **fields of Initialize)`."""


class Stubs:
    """The stubs of one test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._peers: list[HostPeer] = []

    def start(self, execute: Execute | Model, **options: Any) -> HostPeer:
        """Starts a stub of a model and initializes it; `options` are fields of `Initialize`."""
        model = execute if isinstance(execute, Model) else Model(execute)
        peer = HostPeer(f"ipc://{self._folder}/host{len(self._peers)}", model)
        self._peers.append(peer)
        peer.initialize(**options)
        return peer

    def close(self) -> None:
        """Ends all stubs."""
        while self._peers:  # pytest keeps the fixture of the last test until its session has ended
            self._peers.pop().close()


def wire_tensor(value: int, name: str = "IN") -> WireTensor:
    """A tensor of one INT32, inside the message."""
    return WireTensor(name, CODES["INT32"], [1], np.array([value], np.int32).tobytes())


def wire_request(value: int, outputs: list[str] | None = None) -> WireRequest:
    """A request with the input IN, one INT32."""
    return WireRequest(str(value), [wire_tensor(value)], outputs or [], {})


def wire_response(value: int) -> WireResponse:
    """A response of another model, with the output Y, one INT32."""
    return WireResponse([wire_tensor(value, "Y")], {})


def response(value: int, name: str = "OUT") -> pb_utils.InferenceResponse:
    """A model's response of one INT32."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array([value], np.int32))])


def input_value(request: pb_utils.InferenceRequest) -> int:
    """The value of `wire_request`."""
    return int(request.inputs()[0].as_numpy()[0])


def echo(request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
    """The response with the request's value."""
    return response(input_value(request))


def output_value(message: m.Response | None) -> int:
    """The value of `response`, read from its message."""
    assert message is not None and message.response is not None, message
    assert message.response.error is None, message.response.error
    (output,) = message.response.outputs
    assert output.data is not None
    return int(np.frombuffer(output.data, np.int32)[0])


def output_values(messages: list[m.Response]) -> Mapping[int, int]:
    """The values of responses by the index of their request, in the order of arrival."""
    return {message.index: output_value(message) for message in messages}


def error_text(message: m.Response) -> str:
    """The text of an error response, which must be final."""
    assert message.final
    assert message.response is not None and message.response.error is not None, message
    return message.response.error.message
