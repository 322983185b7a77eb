"""The HTTP endpoints inside another ASGI server, uvicorn, with Triton's own client."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
import uvicorn

import pbhost
from tests.clients import check_binary_outputs
from tests.conftest import RepositoryBuilder
from tests.waiting import eventually


def options(repository: RepositoryBuilder) -> pbhost.Options:
    return pbhost.Options(
        model_repository=[str(repository.path)],
        allow_grpc=False,
        allow_http=False,
        allow_metrics=False,
        log_info=False,
    )


async def run_behind_uvicorn(
    repository: RepositoryBuilder, use: Callable[[str], Any], **settings: Any
) -> Any:
    """Runs `use(host and port)` in a thread while uvicorn serves the application.

    Bodies must be `bytes`, as the specification says: some servers pickle them.
    """

    async def with_checks(scope: Any, receive: Any, send: Any) -> None:
        async def send_checked(message: Any) -> None:
            assert type(message.get("body", b"")) is bytes
            await send(message)

        await server.asgi_application(scope, receive, send_checked)

    async with pbhost.Server(options(repository)) as server:
        config = uvicorn.Config(with_checks, port=0, lifespan="on", log_level="warning", **settings)
        other = uvicorn.Server(config)
        serving = asyncio.create_task(other._serve())  # `serve` would take the signals
        try:
            await eventually(lambda: other.started, "uvicorn to start")
            port = other.servers[0].sockets[0].getsockname()[1]
            return await asyncio.to_thread(use, f"127.0.0.1:{port}")
        finally:
            other.should_exit = True
            await serving


@pytest.mark.parametrize("root_path", ["", "/triton"])
def test_tritons_client_is_served_by_uvicorn(repository: RepositoryBuilder, root_path: str) -> None:
    repository.copy("identity")

    def use(url: str) -> None:
        with httpclient.InferenceServerClient(url) as client:
            assert client.is_server_ready()
            for count in (4, 1 << 18, 4 << 20):  # up to 16 MiB
                array = np.arange(count, dtype=np.float32)
                given = httpclient.InferInput("INPUT0", array.shape, "FP32")
                result = client.infer("identity", [given.set_data_from_numpy(array)])
                np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
            check_binary_outputs(f"http://{url}")
            with pytest.raises(httpclient.InferenceServerException, match="unknown model"):
                client.get_model_metadata("no such model")

    asyncio.run(run_behind_uvicorn(repository, use, root_path=root_path))


def test_responses_are_streamed(repository: RepositoryBuilder) -> None:
    repository.add(
        "count",
        """
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    sender = request.get_response_sender()
                    for number in range(3):
                        tensor = pb_utils.Tensor("NUMBER", np.array([number], dtype=np.int32))
                        sender.send(pb_utils.InferenceResponse([tensor]))
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
        """
        output [{name: "NUMBER", data_type: TYPE_INT32, dims: [1]}]
        model_transaction_policy {decoupled: true}
        instance_group [{count: 1, kind: KIND_CPU}]
        """,
    )

    def use(url: str) -> list[int]:
        request = urllib.request.Request(
            f"http://{url}/v2/models/count/generate_stream", b"{}", method="POST"
        )
        with urllib.request.urlopen(request) as response:
            lines = [line for line in response.read().decode().splitlines() if line]
        return [json.loads(line.removeprefix("data: "))["NUMBER"] for line in lines]

    assert asyncio.run(run_behind_uvicorn(repository, use)) == [0, 1, 2]


def test_there_is_no_application_before_the_start(repository: RepositoryBuilder) -> None:
    with pytest.raises(pbhost.HostError, match="Server not ready"):
        _ = pbhost.Server(options(repository)).asgi_application


@pytest.mark.parametrize("path", ["/v1/completions", "/v2/models/m/generate", "/v2/trace/setting"])
def test_a_disconnect_before_the_body_is_no_failure_of_the_server(
    repository: RepositoryBuilder, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """Servers other than pbhost's own do not cancel the application then."""
    repository.copy("identity")
    scope = {
        "type": "http",
        "method": "POST",
        "path": path.replace("/m/", "/identity/"),
        "query_string": b"",
        "headers": [],
    }

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def use() -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async with pbhost.Server(options(repository)) as server:
            await server.asgi_application(scope, receive, send)
        return sent

    assert asyncio.run(use()) == []
    assert "unexpected failure" not in caplog.text
