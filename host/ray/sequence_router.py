"""Sends all requests of a sequence to one replica, in Ray Serve's own proxies."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from host.errors import HostError
from host.frontends.grpc.infer_request import parse_infer_request

_MAX_SEQUENCES = 100_000


class SequenceRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Other requests go to the less busy one of two replicas, as Ray Serve's default router has it.

    A sequence is known by its model and `sequence_id` in unary requests of gRPC, and by the header
    `x-session-id` (HTTP) or the metadata key `session_id` (gRPC) in others. It keeps its replica
    when others come or go. Each proxy has a router; they agree on new sequences by hashing.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._replica_of: OrderedDict[str, Any] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Returns replicas in groups; the first group with a free replica is used."""
        if pending_request is None or not candidate_replicas:
            return await super().choose_replicas(candidate_replicas, pending_request)  # type: ignore[no-any-return]
        # Without the pause, requests that no replica takes now would keep the proxy busy.
        pending_request.routing_context.should_backoff = True
        sequence = pending_request.metadata.session_id or _sequence_of(pending_request)
        if not sequence:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        replica = self.curr_replicas.get(self._replica_of.get(sequence))
        if replica is None:
            pending_request.metadata.session_id = sequence
            ranks = await super().choose_replicas(candidate_replicas, pending_request)
            if not ranks:
                return []
            replica = ranks[0][0]
        self._replica_of[sequence] = replica.replica_id
        self._replica_of.move_to_end(sequence)
        if len(self._replica_of) > _MAX_SEQUENCES:
            self._replica_of.popitem(last=False)
        return [[replica]]


def _sequence_of(pending_request: Any) -> str:
    """The model and the id of the sequence that a ModelInfer request belongs to; "" for none."""
    if pending_request.metadata.call_method != "ModelInfer":
        return ""
    # The proxy passes requests in pickled form.
    (pickled,) = pending_request.args
    if b"sequence_id" not in pickled:
        return ""
    try:
        message = parse_infer_request(pickle.loads(pickled).user_request_proto)
    except HostError:
        return ""  # any replica can refuse it
    value = message.parameters.get("sequence_id")
    if value is None:
        return ""
    number_or_text = value.string_param or value.int64_param or value.uint64_param
    return f"{message.model_name}/{number_or_text}" if number_or_text else ""
