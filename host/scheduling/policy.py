"""Queue policies: priorities, queue sizes and timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from host.config.schema import ConfigPart
from host.inference.request import InferRequest

_DELAY = 1  # ModelQueuePolicy.TimeoutAction


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The limits of one priority level.

    `timeout_us`: microseconds, 0 for none. `max_size`: requests, 0 for no limit. `may_shorten`: a
    request may set a shorter timeout. `delays`: a request that timed out is served after the others
    of its level instead of being refused. Source: docs/reference/configuration-and-scheduling.md,
    "Queue policies".
    """

    timeout_us: int = 0
    may_shorten: bool = False
    delays: bool = False
    max_size: int = 0

    def timeout_ns(self, request: InferRequest) -> int:
        """Nanoseconds that the request may wait, 0 for any time."""
        asked = request.timeout_us
        if self.may_shorten and 0 < asked < self.timeout_us:
            return asked * 1000
        return self.timeout_us * 1000


@dataclass(frozen=True, slots=True)
class QueuePolicies:
    """The policies of all priority levels; `levels` 0: priorities are ignored."""

    levels: int = 0
    default_level: int = 0
    default: QueuePolicy = QueuePolicy()
    own: Mapping[int, QueuePolicy] = field(default_factory=dict)

    def priority_level(self, request: InferRequest) -> int:
        """The level of a request; 1 is served first.

        Source: docs/reference/configuration-and-scheduling.md, "Priorities".
        """
        if 0 < request.priority <= self.levels:
            return request.priority
        return self.default_level if self.levels else 0

    def policy_of_level(self, level: int) -> QueuePolicy:
        """The limits of a level."""
        return self.own.get(level, self.default)

    @property
    def need_policy_queue(self) -> bool:
        """Whether anything differs from an unlimited first-come-first-served queue."""
        return self.levels > 0 or self.default.timeout_us > 0 or self.default.max_size > 0


def read_queue_policies(batching: ConfigPart) -> QueuePolicies:
    """Reads a `ModelDynamicBatching` message."""
    return QueuePolicies(
        batching.priority_levels,
        batching.default_priority_level,
        _policy(batching.default_queue_policy),
        {
            level: _policy(policy)
            for level, policy in batching.priority_queue_policy.items()
            if batching.priority_levels
        },
    )


def _policy(message: ConfigPart) -> QueuePolicy:
    return QueuePolicy(
        timeout_us=message.default_timeout_microseconds,
        may_shorten=message.allow_timeout_override,
        delays=message.timeout_action == _DELAY,
        max_size=message.max_queue_size,
    )
