"""Models that change their stub so that it sends false messages to the host."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np

from tests.clients import infer_error, run_script, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, Serve, wait_until

LIAR = """
    import triton_python_backend_utils as pb_utils
    from pb_utils import _runtime
    from stub.wire import messages as m

    LIES = [
        m.Response(1, -1, None),
        m.Response(1, 0, None, final=False),
        m.BatchDone(1, 1, 1, 1, 1, deferred=(-1,)),
        m.BatchDone(1, 1, 1, 1, 1, rescheduled=(-1,)),
    ]


    class TritonPythonModel:
        def execute(self, requests):
            x = pb_utils.get_input_tensor_by_name(requests[0], "x")
            number = x.as_numpy()[0]
            if number >= 0:
                _runtime.current()._channel.send([LIES[number]])
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy())])]
"""

CONFIG = """
    backend: "python"
    input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def test_a_stub_that_lies_about_its_requests_is_ended_and_another_one_serves(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    names = [f"liar{lie}" for lie in range(4)]
    for name in names:
        repository.add(name, LIAR, CONFIG)
    running = serve(repository).wait_started()
    with running.client() as client:
        for lie, name in enumerate(names):
            given = tensor("x", np.array([lie], dtype=np.int32))
            status, text = infer_error(client.infer, name, [given], client_timeout=DEADLINE)
            assert status == "StatusCode.UNAVAILABLE" and "is not healthy" in text, (name, text)
        said = "the stub broke the protocol"
        wait_until(lambda: running.output.count(said) == 4, "the log to say why")
        for name in names:
            wait_until(partial(client.is_model_ready, name), "another stub")
            honest: Any = client.infer(name, [tensor("x", np.array([-1], dtype=np.int32))])
            assert honest.as_numpy("y").tolist() == [-1]


def test_frames_beside_the_ring_are_dropped_and_counted(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    """Half a gigabyte that the ring does not announce: it would collect in the host."""
    repository.copy("script")
    running = serve(repository).wait_started()
    script = """
import threading
from pb_utils import _runtime
runtime, sent = _runtime.current(), threading.Event()
channel = runtime._channel
receive = channel.receive_service
def flood(*given):  # on the thread to which the socket belongs
    channel.receive_service = receive
    for _ in range(2000): channel._service.send(bytes(1 << 18))
    sent.set()
    return receive(*given)
channel.receive_service = flood
runtime._wake()
assert sent.wait(60)
"""
    with running.client() as client:
        before = running.stubs("script_0")
        run_script(client, script, client_timeout=DEADLINE)
        assert run_script(client, "return 1", client_timeout=DEADLINE) == 1
        assert running.stubs("script_0") == before
    assert running.stop() == 0
    assert re.search(
        r"script_0\] dropped \d+ frames that the ring did not announce", running.output
    )
    assert "broke the protocol" not in running.output
