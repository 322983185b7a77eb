"""Metadata and statistics of the server and its models, which frontends translate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """Name (`--id`), version, and the protocol extensions, in their fixed order."""

    name: str
    version: str
    extensions: list[str]


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """An input or output: `datatype` is the protocol's name; in `shape`, -1 is a variable
    dimension.

    The shape of a model that batches starts with -1.
    """

    name: str
    datatype: str
    shape: list[int]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model. `versions`: the ready ones, or exactly the requested one."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A line of the repository index; unknown fields are empty.

    `state`: UNKNOWN, READY, UNAVAILABLE, LOADING or UNLOADING. `reason`: why.
    """

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Duration:
    """How often something happened, and its total time in nanoseconds."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class InferenceStatistics:
    """Where the requests of a model version spent their time.

    Source: docs/reference/metrics.md, "Members".
    """

    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    cache_hit: Duration = Duration()
    cache_miss: Duration = Duration()


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Executions of one batch size."""

    batch_size: int
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """Statistics of one model version since it was loaded.

    `last_inference`: milliseconds since the epoch, 0 for never. `inference_count`: batch elements.
    `execution_count`: batches. `batch_stats`: one entry for each batch size that occurred.
    """

    name: str
    version: str
    last_inference: int = 0
    inference_count: int = 0
    execution_count: int = 0
    inference_stats: InferenceStatistics = InferenceStatistics()
    batch_stats: list[BatchStatistics] = field(default_factory=list)


_Durations = TypeVar("_Durations", InferenceStatistics, BatchStatistics)


def add_statistics(servers: Iterable[Iterable[ModelStatistics]]) -> list[ModelStatistics]:
    """The sum over servers, for each version of each model; the last inference is the latest."""
    sums: dict[tuple[str, str], ModelStatistics] = {}
    for models in servers:
        for model in models:
            known = sums.get((model.name, model.version))
            sums[model.name, model.version] = model if known is None else _add(known, model)
    return list(sums.values())


def _add(left: ModelStatistics, right: ModelStatistics) -> ModelStatistics:
    batches = {batch.batch_size: batch for batch in left.batch_stats}
    for batch in right.batch_stats:
        known = batches.get(batch.batch_size)
        batches[batch.batch_size] = batch if known is None else _add_durations(known, batch)
    return ModelStatistics(
        left.name,
        left.version,
        max(left.last_inference, right.last_inference),
        left.inference_count + right.inference_count,
        left.execution_count + right.execution_count,
        _add_durations(left.inference_stats, right.inference_stats),
        [batches[size] for size in sorted(batches)],
    )


def _add_durations(left: _Durations, right: _Durations) -> _Durations:
    changes: dict[str, Any] = {}
    for duration in fields(left):
        one, other = getattr(left, duration.name), getattr(right, duration.name)
        if isinstance(one, Duration):
            changes[duration.name] = Duration(one.count + other.count, one.ns + other.ns)
    return replace(left, **changes)
