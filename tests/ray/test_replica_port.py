"""The port of a replica, as the installed version of Ray starts it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from host.ray.replica_port import serve_replica_port

pytest.importorskip("ray", reason="ray is not installed: make test-ray")


def test_the_installed_version_of_ray_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private import replica

    own = replica.start_grpc_server
    monkeypatch.setattr(replica, "start_grpc_server", own)  # restored at the end

    async def case() -> bool:
        return serve_replica_port(SimpleNamespace(services=dict))

    assert asyncio.run(case())
    assert replica.start_grpc_server is not own
