"""A replica whose start ends half-way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, wait_until
from tests.ray.conftest import RayCluster

pytest.importorskip("ray", reason="ray is not installed: make test-ray")

WAITS = """
import threading

class TritonPythonModel:
    def initialize(self, args):
        open({began!r}, "w").close()
        threading.Event().wait({deadline!r})  # until the process is killed

    def execute(self, requests):
        return []
"""
BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("it cannot start")

    def execute(self, requests):
        return []
"""


POOL = "asyncio_", "ThreadPoolExecutor-"
"""Names of threads of the event loop's pool."""
RAY = "_run_router_event_loop"
"""In the name of a thread that Ray keeps for the handles of a process."""


def make_probe(arguments: dict[str, Any], model: str, began: Path) -> Any:
    """A deployment that starts a replica, and cancels that once a file is there.

    It tells how the start has ended, and what is open that was not open before. A replica of one
    model has a connection to that of another one by then.
    """
    from ray import serve

    from host.ray.model_replicas import ModelReplica

    class Probe:
        async def __init__(self, *others: object) -> None:  # type: ignore[misc]
            import asyncio

            await asyncio.to_thread(lambda: None)  # the threads of the event loop count as before
            before = self.list_open()
            self.ended = await self.start()
            after = self.list_open()
            self.still_open = {kind: after[kind] - before[kind] for kind in after}

        async def start(self) -> str:
            import asyncio

            from host.ray.replica import ServerReplica

            if model:
                names = {"waits": "model-waits", "identity": "model-identity"}
                made: Any = ModelReplica.__new__(ModelReplica)
                start = asyncio.ensure_future(made.__init__(arguments, model, names))
            else:
                made = ServerReplica.__new__(ServerReplica)
                start = asyncio.ensure_future(made.__init__(arguments))
            self.made = made  # nothing is closed because it is not referenced
            await asyncio.to_thread(wait_until, lambda: start.done() or began.exists(), "the model")
            if model:
                assert await made._connection.ready()
                assert "Channel._read" in str(self.list_open()["tasks"])
            start.cancel()
            await asyncio.wait([start])
            return "cancelled" if start.cancelled() else str(start.exception())

        @staticmethod
        def list_open() -> dict[str, Any]:
            import asyncio
            import gc
            import threading
            from collections import Counter

            import psutil

            gc.collect()
            process = psutil.Process()
            files = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.exists()]
            return {
                "children": Counter(" ".join(one.cmdline()) for one in process.children(True)),
                "listening": Counter(
                    str(one.laddr) for one in process.net_connections() if one.status == "LISTEN"
                ),
                "memory": Counter(one for one in files if "memfd" in one or "/dev/shm" in one),
                "tasks": Counter(str(one.get_coro()) for one in asyncio.all_tasks()),
                "threads": Counter(
                    one.name
                    for one in threading.enumerate()
                    if not one.name.startswith(POOL) and RAY not in one.name
                ),
            }

        async def read(self) -> str:
            return json.dumps([self.ended, self.still_open])

    options: Any = {"ray_actor_options": {"num_cpus": 0}}
    own = {**arguments, "load_model": ["identity"]}
    other = serve.deployment(ModelReplica).options(name="model-identity", **options)
    others = [other.bind(own, "identity", {})] if model else []
    return serve.deployment(Probe).options(**options).bind(*others)


@pytest.mark.parametrize(
    ("model", "text", "ended"),
    [
        ("", BROKEN, "failed to load all models"),
        ("", WAITS, "cancelled"),
        ("waits", WAITS, "cancelled"),
    ],
)
def test_a_start_that_ends_half_way_leaves_nothing_open(
    cluster: RayCluster,
    repository: RepositoryBuilder,
    tmp_path: Path,
    model: str,
    text: str,
    ended: str,
) -> None:
    from ray import serve

    began = tmp_path / "began"
    repository.copy("identity")
    repository.add(
        "waits",
        text.format(began=str(began), deadline=DEADLINE),
        "instance_group [{kind: KIND_CPU}]",
    )
    arguments: dict[str, Any] = {
        "model_repository": str(repository.path),
        "model_control_mode": "explicit",
    }
    arguments["load_model"] = [model] if model else ["identity", "waits"]
    with cluster.deploy(make_probe(arguments, model, began)) as replicas:
        handle = serve.get_app_handle(replicas.name)
        how, still_open = json.loads(handle.read.remote().result(timeout_s=DEADLINE))
    assert ended in how
    assert still_open == {kind: {} for kind in still_open}
