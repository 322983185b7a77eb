"""An overview of a server in numbers: its models, their instances, and what they use.

`GET /v2/overview` sends it (docs/reference/metrics.md, "Overview"). Counters start at the load of
a model; a client computes rates and quantiles from two overviews.
"""

from __future__ import annotations

import msgspec


class InstanceOverview(msgspec.Struct, frozen=True):
    """One instance of a model. `state` is as in the log; `serving` is the usual one.

    `resident_bytes`: memory of the stub process, with pages that it shares with others; 0 without a
    process. `busy_us`: time that it executed batches.
    """

    name: str
    pid: int
    state: str
    restarts: int
    busy_us: int
    resident_bytes: int


class ModelOverview(msgspec.Struct, frozen=True):
    """One version of a model, or, with version 0, a model without versions.

    `state` and `reason` are those of the repository index. `pending`: requests that wait for an
    execution. `in_flight`: requests without a complete response, with the pending ones. `success`,
    `failure`: requests. `inferences`, `executions`: batch elements and batches. `request_us`,
    `queue_us`: sums over successful requests. `latency`: upper bounds in microseconds, and the
    number of successful requests in each bucket that is not empty, ascending. `first_token`,
    `inter_token`: the same for streamed texts, with empty buckets and wider ones; empty if none was
    streamed. Their last bucket counts longer times, too.
    """

    name: str
    namespace: str
    version: int
    state: str
    reason: str
    pending: int = 0
    in_flight: int = 0
    success: int = 0
    failure: int = 0
    inferences: int = 0
    executions: int = 0
    request_us: int = 0
    queue_us: int = 0
    latency: list[tuple[float, int]] = []
    first_token: list[tuple[float, int]] = []
    inter_token: list[tuple[float, int]] = []
    instances: list[InstanceOverview] = []


class ServerOverview(msgspec.Struct, frozen=True):
    """A server. `uptime_seconds` only grows, so that rates can be computed from two overviews.

    `version` is that of pbhost. `resident_bytes` and `cpu_seconds` are those of the server process
    without its stubs. `model_control`: whether clients may load and unload models.
    """

    name: str
    version: str
    uptime_seconds: float
    resident_bytes: int
    cpu_seconds: float
    model_control: bool
    models: list[ModelOverview]
