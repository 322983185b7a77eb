"""Metadata and statistics of the server and its models, which frontends translate."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    inputs: list[TensorMetadata] = field(default_factory=list)
    outputs: list[TensorMetadata] = field(default_factory=list)


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

    Source: docs/reference/protocol.md, "Members".
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
