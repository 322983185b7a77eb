"""Opens the port of a replica for other replicas."""

from __future__ import annotations

import logging
import os

import ray.util

from host.ray.channels.channel_server import ChannelAddress, ChannelServer

_log = logging.getLogger("pbhost")


async def listen(server: ChannelServer) -> ChannelAddress | None:
    """The address of this replica; None if there can be none, so that all goes through Ray."""
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return None  # these connections are not encrypted, and Ray's are
    try:
        return await server.start(ray.util.get_node_ip_address())
    except OSError as error:
        _log.warning("no port for requests of other replicas, which go through Ray: %s", error)
        return None
