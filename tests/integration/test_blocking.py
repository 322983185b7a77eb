"""Wrong uses of a `BlockingServer`, and their errors."""

from __future__ import annotations

import os
from collections.abc import Generator

import numpy as np
import pytest

import pbhost
from tests.conftest import RepositoryBuilder, wait_until


def options(repository: RepositoryBuilder, log_file: str = "") -> pbhost.Options:
    return pbhost.Options(
        model_repository=[str(repository.path)],
        allow_grpc=False,
        allow_http=False,
        allow_metrics=False,
        log_file=log_file,
    )


def test_a_blocking_server_that_does_not_run_says_so(repository: RepositoryBuilder) -> None:
    repository.copy("identity")
    inputs = {"INPUT0": np.zeros(1, dtype=np.float32)}
    server = pbhost.BlockingServer(options(repository))
    assert server.stop(), "there is nothing to stop"
    with pytest.raises(pbhost.HostError, match="does not run in this process"):
        server.infer("identity", inputs)
    with server:
        child = os.fork()
        if not child:  # whose copy of the server has no thread
            assert server.stop()
            try:
                server.infer("identity", inputs)
            except pbhost.HostError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert server.infer("identity", inputs)["OUTPUT0"].tolist() == [0]
    assert server.stop(), "it has been stopped"
    with pytest.raises(pbhost.HostError, match="does not run in this process"):
        server.infer("identity", inputs)
    with pytest.raises(pbhost.HostError, match="has been started before; create a new one"):
        server.start()


def test_a_log_file_that_cannot_be_written_is_named(repository: RepositoryBuilder) -> None:
    server = pbhost.BlockingServer(options(repository, log_file="/proc/none/log"))
    with pytest.raises(pbhost.HostError, match="cannot write the log to '/proc/none/log'"):
        server.start()


def test_a_stream_yields_all_responses_and_leaving_it_cancels(
    repository: RepositoryBuilder, capfd: pytest.CaptureFixture[str]
) -> None:
    repository.copy("identity", "stream")

    def ask(command: str) -> Generator[pbhost.Result, None, None]:
        return server.stream("stream", {"COMMAND": np.array([command], dtype=np.object_)})

    with pbhost.BlockingServer(options(repository)) as server:
        assert [one["NUMBER"].item() for one in ask("many=3 last")] == [0, 1, 2, 3]
        assert [one["NUMBER"].item() for one in ask("many=2 final")] == [0, 1]
        ones = np.ones(2, np.float32)
        (only,) = server.stream("identity", {"INPUT0": ones}, request_id="7")
        assert (only.id, only["OUTPUT0"].tolist()) == ("7", [1, 1])
        responses = ask("respond last_error=sad")
        assert next(responses)["NUMBER"] == [0]
        with pytest.raises(pbhost.HostError, match="sad"):
            next(responses)
        with pytest.raises(pbhost.HostError, match="unexpected inference input 'Q'"):
            next(server.stream("identity", {"Q": ones}))
        for _ in ask("respond cancelled final"):
            break
        output = ""

        def was_cancelled() -> bool:
            nonlocal output
            output += "".join(capfd.readouterr())
            return "was cancelled" in output

        wait_until(was_cancelled, "the cancellation", state=lambda: output)
        left = ask("respond final")
        next(left)
    left.close()
    with pytest.raises(pbhost.HostError, match="does not run in this process"):
        next(ask("final"))


def test_models_are_loaded_and_unloaded(repository: RepositoryBuilder) -> None:
    repository.copy("identity")
    settings = pbhost.Options(
        model_repository=[str(repository.path)],
        model_control_mode="explicit",
        allow_grpc=False,
        http_port=0,
        http_address="127.0.0.1",
        allow_metrics=False,
    )
    with pbhost.BlockingServer(settings) as server:
        assert server.http_port > 0
        with pytest.raises(pbhost.HostError, match="failed to load 'nope'"):
            server.load_model("nope")
        server.load_model("identity")
        inputs = {"INPUT0": np.zeros(1, dtype=np.float32)}
        assert server.infer("identity", inputs)["OUTPUT0"].tolist() == [0]
        server.unload_model("identity")
        with pytest.raises(pbhost.HostError, match="identity"):
            server.infer("identity", inputs)
