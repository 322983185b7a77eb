"""The stub's end of the connection, where it waits for work."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import zmq

from stub.channel import Channel
from stub.wire import messages as m
from stub.wire.ring import ROUSE, RingWriter, create_file, map_file
from stub.wire.spawn import Spawn


@pytest.mark.parametrize("seconds", [0.0, 0.0001, 0.05])
def test_a_stub_that_is_roused_takes_its_work_whenever_that_comes(
    tmp_path: Path, seconds: float
) -> None:
    """Before it looks, while it looks, or after it has tired of that and sleeps."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    endpoint = f"ipc://{tmp_path}/host"
    router.bind(endpoint)
    rings, work, host = create_file("rings"), os.eventfd(0), os.eventfd(0)
    channel = Channel(Spawn(endpoint, "t", "title", -1, rings, work, host, 1, -1, 0, -1, 0))
    ring = RingWriter(map_file(rings)[0])
    wanted = m.Describe(m.ModelSource("/models/a", 1, "model.py"), "{}")

    def send() -> None:
        ring.put(m.encode([wanted]))
        os.eventfd_write(work, 1)

    sender = threading.Timer(seconds, send)
    os.eventfd_write(work, ROUSE)
    if seconds:
        sender.start()
    else:
        send()
    try:
        assert channel.receive_work() == [wanted]
        assert channel.is_idle() == bool(seconds)
        os.eventfd_write(work, 1)
        assert not channel.is_idle()
    finally:
        sender.cancel()
        channel.abandon()
        channel.close()
        context.destroy(0)
        for descriptor in (rings, work, host):
            os.close(descriptor)
