"""What Ray Serve says of the replicas of deployments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

_STATUS_SECONDS = 5.0
_ANSWERING = ("RUNNING", "UPDATING", "PENDING_MIGRATION")


class ServeStatusReader:
    """Asks Ray Serve for its status, once at a time in this process.

    A question costs CPU time for each deployment, in this process and in the controller. It does
    not end when its caller gives up, so that many of them would keep a busy machine from answering.
    """

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._answer: Future[Any] | None = None

    async def read(self) -> Any:
        """The status, which callers at the same time share.

        Raises RayError, RayServeException, and TimeoutError.
        """
        with self._lock:
            if self._answer is None or self._answer.done():
                self._answer = Future()
                threading.Thread(target=self._run, args=[self._answer], daemon=True).start()
            answer = asyncio.wrap_future(self._answer)
        try:
            return await asyncio.wait_for(asyncio.shield(answer), _STATUS_SECONDS)
        except asyncio.TimeoutError:
            raise TimeoutError(f"no status of Ray Serve within {_STATUS_SECONDS:g} s") from None

    def _run(self, answer: Future[Any]) -> None:
        try:
            answer.set_result(self._ask())
        except BaseException as error:  # of any kind: the callers get it
            answer.set_exception(error)


def _ask_ray() -> Any:
    return serve.status()


_status = ServeStatusReader(_ask_ray)


async def count_replicas(handle: DeploymentHandle) -> int:
    """How many replicas of a deployment answer requests, as Ray knows it.

    Raises as `ServeStatusReader.read`.
    """
    status = await _status.read()
    application = status.applications.get(handle.app_name)
    deployment = application and application.deployments.get(handle.deployment_name)
    if not deployment:
        return 0
    states = {str(getattr(key, "value", key)): n for key, n in deployment.replica_states.items()}
    return sum(states.get(state, 0) for state in _ANSWERING)
