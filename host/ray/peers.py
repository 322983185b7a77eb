"""The replicas of a deployment, as one of them calls methods of all."""

from __future__ import annotations

from typing import TypeVar

from ray import serve
from ray.exceptions import RayError

from host.errors import unavailable
from host.ray.channels.channel_server import ChannelAddress, ChannelServer
from host.ray.channels.replica_channels import ReplicaChannels
from host.ray.channels.replica_method import ReplicaMethod

_Result = TypeVar("_Result")


class Peers:
    """Calls methods of all replicas of this replica's deployment, itself included.

    `server` and `address`: where this replica takes calls; without an address, all calls go through
    Ray Serve.
    """

    def __init__(self, server: ChannelServer, address: ChannelAddress | None) -> None:
        context = serve.get_replica_context()
        self.own_id: str = context.replica_id.unique_id
        self.configured: int | None = context.world_size
        """The number of replicas that is configured; not what autoscaling has made of it."""
        self.address = address
        self._deployment = context.deployment
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        self.channels = ReplicaChannels(lambda: handle, (server, address))

    async def call(
        self, method: ReplicaMethod[_Result], *arguments: object, timeout: float
    ) -> list[_Result]:
        """The results of those that live. Raises HostError UNAVAILABLE if one does not answer."""
        try:
            return await self.channels.call_all(method, *arguments, timeout=timeout)
        except TimeoutError:
            raise unavailable(
                f"not all replicas of deployment '{self._deployment}' answered '{method.name}'"
                f" within {timeout:g} s"
            ) from None
        except RayError as error:
            reason = (str(error).strip().splitlines() or [""])[-1]
            raise unavailable(
                f"a replica of deployment '{self._deployment}' failed to answer '{method.name}':"
                f" {type(error).__name__}: {reason}"
            ) from error
