"""Models that change their stub so that it sends false messages to the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tests.clients import infer_error, tensor
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
