"""Requests of sequences behind HAProxy."""

from __future__ import annotations

import asyncio

import pytest

from host.errors import HostError
from host.ray.sequence_guard import BALANCE_VARIABLE, SequenceGuard
from pbhost import Options, Server
from tests.conftest import RepositoryBuilder

MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""


def test_the_header_of_the_algorithm_may_have_capitals(
    repository: RepositoryBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.add("model", MODEL, "sequence_batching { }")
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    monkeypatch.setenv(BALANCE_VARIABLE, "hdr(X-Session-Id)")
    options = Options(
        model_repository=[str(repository.path)],
        allow_grpc=False,
        allow_http=False,
        allow_metrics=False,
    )

    async def scene() -> None:
        async with Server(options) as server:
            guard = SequenceGuard(server.core)
            path = "/v2/models/model/infer"
            guard.check_http({"path": path, "headers": [(b"x-session-id", b"7")]})
            with pytest.raises(HostError, match="send the header x-session-id"):
                guard.check_http({"path": path, "headers": [(b"other", b"7")]})
            message = b"sequence_id"  # where the guard looks before it parses
            guard.check_rpc(message, [("x-session-id", "7")])

    asyncio.run(scene())
