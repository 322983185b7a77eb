"""How many replicas an application needs, by its requests and by the queues of its models."""

from __future__ import annotations

from typing import Any

QUEUE_SECONDS = "queue_seconds"
"""The name of a replica's statistic for autoscaling: the mean time in its queues, in seconds."""

UNCOUNTED_REQUESTS = "uncounted_requests"
"""The name of the statistic of requests in progress that arrived outside of Ray Serve."""

TARGET_QUEUE_SECONDS = 0.1
"""Seconds in a queue above which replicas are added."""

_MOST_GROWTH = 2.0  # the factor of one decision


def choose_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """The larger of two numbers of replicas: by ongoing requests, and by the time in queues.

    `context` is Ray Serve's AutoscalingContext. Ray applies its limits, delays and factors to the
    result. Requests decide as in its default policy (`target_ongoing_requests`). With a mean time
    in queues above `TARGET_QUEUE_SECONDS`, the number grows in proportion, to its double at most;
    it does not shrink while that time is above the half of it.
    """
    current = context.current_num_replicas
    statistics = context.aggregated_metrics or {}
    uncounted = sum(statistics.get(UNCOUNTED_REQUESTS, {}).values())
    requests = context.total_num_requests + uncounted
    by_requests = requests / context.config.target_ongoing_requests
    seconds = statistics.get(QUEUE_SECONDS, {}).values()
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    pressure = mean / TARGET_QUEUE_SECONDS
    by_queue = 0.0
    if pressure > 1.0:
        by_queue = current * min(pressure, _MOST_GROWTH)
    elif pressure > 0.5:
        by_queue = float(current)
    return max(by_requests, by_queue), {}
