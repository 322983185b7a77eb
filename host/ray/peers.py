"""The other replicas of a deployment, as one of them reaches them."""

from __future__ import annotations

import logging
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from host.errors import unavailable

_log = logging.getLogger("pbhost")


async def call_all(
    handle: DeploymentHandle, method: str, *arguments: Any, timeout: float
) -> list[Any]:
    """Calls a method of all replicas of a deployment.

    Returns the results of those that live; an empty list while Ray knows of none. Raises
    TimeoutError after `timeout` seconds, and the first error of a method.
    """
    try:
        answers = await handle.broadcast(method, *arguments).results_async(
            timeout_s=timeout, return_exceptions=True
        )
    except RayServeException as error:  # no replica has been ready yet
        _log.debug("no replica to call %s of: %s", method, error)
        return []
    results = []
    for answer in answers:
        if isinstance(answer, RayActorError):
            continue  # it has died, and Ray replaces it
        if isinstance(answer, BaseException):
            raise answer
        results.append(answer)
    return results


class Peers:
    """Calls methods of all replicas of this replica's deployment, itself included."""

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self.own_id: str = context.replica_id.unique_id
        self.configured: int | None = context.world_size
        """The number of replicas that is configured; not what autoscaling has made of it."""
        self._deployment = context.deployment
        self._handle = serve.get_deployment_handle(context.deployment, context.app_name)

    async def call(self, method: str, *arguments: Any, timeout: float) -> list[Any]:
        """As `call_all`, but raises HostError UNAVAILABLE if a replica does not answer."""
        try:
            return await call_all(self._handle, method, *arguments, timeout=timeout)
        except TimeoutError:
            raise unavailable(
                f"not all replicas of deployment '{self._deployment}' answered '{method}' within"
                f" {timeout:g} s; one whose max_ongoing_requests are all in progress answers later"
            ) from None
        except RayError as error:
            reason = (str(error).strip().splitlines() or [""])[-1]
            raise unavailable(
                f"a replica of deployment '{self._deployment}' failed to answer '{method}':"
                f" {type(error).__name__}: {reason}"
            ) from error
