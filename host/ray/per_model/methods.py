"""The methods that deployments call of each other; a `Refusal` is an error."""

from __future__ import annotations

from typing import Any

from host.inference.metadata import IndexEntry, ModelStatistics
from host.ray.channels.messages import PackedVersion, Refusal
from host.ray.channels.replica_method import ReplicaMethod

DESCRIBE_MODEL = ReplicaMethod[list[PackedVersion] | Refusal](
    "describe_model", tuple[()], list[PackedVersion] | Refusal
)
INDEX_ENTRIES = ReplicaMethod[list[IndexEntry] | Refusal](
    "index_entries", tuple[bool], list[IndexEntry] | Refusal
)
IS_READY = ReplicaMethod[bool | Refusal]("is_ready", tuple[()], bool | Refusal)
LOAD_FOR_CLIENT = ReplicaMethod[Refusal | None](
    "load_for_client", tuple[dict[str, Any]], Refusal | None
)
MODEL_STATISTICS = ReplicaMethod[list[ModelStatistics] | Refusal](
    "model_statistics", tuple[str], list[ModelStatistics] | Refusal
)
REFRESH_MODEL = ReplicaMethod[None]("refresh_model", tuple[str], None)
UNLOAD_FOR_CLIENT = ReplicaMethod[Refusal | None]("unload_for_client", tuple[bool], Refusal | None)
