"""Wrong uses of a `BlockingServer`, and their errors."""

from __future__ import annotations

import os

import numpy as np
import pytest

import pbhost
from tests.conftest import RepositoryBuilder


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
