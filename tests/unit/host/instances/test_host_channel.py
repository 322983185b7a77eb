"""The host's end of the ZeroMQ connections to all stubs."""

from __future__ import annotations

import asyncio

import zmq

from host.instances.host_channel import Channel
from tests.conftest import DEADLINE

FRAMES = 1000
SIZE = 1 << 18


def test_frames_that_the_host_has_not_read_wait_in_the_stub_and_none_is_lost() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        channel = Channel()
        received: list[int] = []
        all_received = asyncio.Event()

        def handle(frame: bytes) -> None:
            received.append(int.from_bytes(frame[:4], "little"))
            if len(received) == FRAMES:
                all_received.set()

        channel.register("token", handle)
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, b"token")
        socket.setsockopt(zmq.SNDHWM, 1)
        socket.setsockopt(zmq.SNDTIMEO, 1000)
        socket.connect(channel.open_endpoint())
        sent = 0
        try:
            while sent < FRAMES:  # the loop does not run, so the host reads nothing
                socket.send(sent.to_bytes(4, "little") + bytes(SIZE))
                sent += 1
        except zmq.Again:
            pass
        assert sent < FRAMES // 2, "the host has received all that was sent"
        socket.setsockopt(zmq.SNDTIMEO, int(DEADLINE * 1000))

        def send_the_rest() -> None:
            for number in range(sent, FRAMES):
                socket.send(number.to_bytes(4, "little") + bytes(SIZE))

        await loop.run_in_executor(None, send_the_rest)
        await asyncio.wait_for(all_received.wait(), DEADLINE)
        assert received == list(range(FRAMES))
        socket.close(0)
        context.term()
        channel.close()

    asyncio.run(run())
