"""Loads models that requests ask for.

Source: docs/reference/model-control.md, "Loading on demand".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from host.config.parameters import loads_on_demand
from host.config.schema import ModelConfig
from host.errors import HostError, not_found, unavailable
from host.inference.request import InferRequest
from host.logs.formats import model_fields
from host.metrics.families import MetricsSnapshot
from host.model_control.dependencies import EnsembleDependencies
from host.model_control.load_planner import LoadRequest
from host.models.registry import Registry
from host.repository.repository import Repository
from host.scheduling.queue import QueuePolicies, read_queue_policies

_log = logging.getLogger("pbhost")

_Started = TypeVar("_Started")


@dataclass(slots=True)
class LoadCounts:
    """What a model's loads on demand came to; `waited_s`: seconds of all its requests together."""

    succeeded: int = 0
    failed: int = 0
    requests: int = 0
    waited_s: float = 0.0


@dataclass(slots=True)
class _PendingLoad:
    """One load that requests wait for; the task returns its error."""

    known: str
    policies: QueuePolicies
    task: asyncio.Task[HostError | None]
    counts: LoadCounts
    waiters: int = field(default=0)


class OnDemandLoads:
    """Makes requests wait until their model is loaded: one load for all requests that wait.

    Belongs to the event loop. `by_default`: whether a model without the parameter LOAD_ON_DEMAND
    loads on demand. `timeout`: the most seconds that a request waits.
    """

    def __init__(
        self,
        registry: Registry,
        repository: Repository,
        dependencies: EnsembleDependencies,
        *,
        by_default: bool,
        timeout: float,
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._dependencies = dependencies
        self._planner = dependencies.lifecycle.planner
        self._by_default = by_default
        self._timeout = timeout
        self._pending: dict[str, _PendingLoad] = {}
        self._awaited: Counter[str] = Counter()
        self._counts: dict[str, LoadCounts] = {}

    async def start_when_loaded(
        self, request: InferRequest, start: Callable[[], _Started]
    ) -> _Started:
        """Loads the model of a request, then calls `start`; returns its result.

        The model is not unloaded to make room between its load and the call. Raises the error of
        the load, UNAVAILABLE if the load takes too long, or what `start` raises.
        """
        began = time.monotonic()
        name = request.model_name
        pending = await self._find_or_start_load(name)
        if pending is None:
            return start()
        known, counts = pending.known, pending.counts
        self._awaited[known] += 1
        counts.requests += 1
        try:
            await self._wait(pending, request, began)
            return start()
        finally:
            counts.waited_s += time.monotonic() - began
            self._awaited[known] -= 1

    def is_awaited(self, known: str) -> bool:
        """Whether a request waits for this model."""
        return self._awaited[known] > 0

    async def _wait(self, pending: _PendingLoad, request: InferRequest, began: float) -> None:
        """Waits for a load, at most until the timeout of the request. Raises HostError."""
        policies = pending.policies
        policy = policies.policy_of_level(policies.priority_level(request))
        limit = policy.timeout_ns(request) / 1e9
        expires = 0 < limit < self._timeout
        left = began + (limit if expires else self._timeout) - time.monotonic()
        done, _ = await asyncio.wait([pending.task], timeout=max(0.0, left))
        if not done and expires:
            raise unavailable("Request timeout expired")
        if not done:
            raise unavailable(
                f"model '{request.model_name}' did not load within {self._timeout:g} s; loading"
                " continues"
            )
        if pending.task.cancelled():
            raise unavailable("Server exiting")
        error = pending.task.result()
        if error is not None:  # a new one for each request, as they carry tracebacks
            raise unavailable(f"failed to load '{request.model_name}': {error.message}")

    async def _find_or_start_load(self, name: str) -> _PendingLoad | None:
        """The load of a model; None if requests cannot load the model, or it is loaded by now."""
        if name in self._pending:
            return self._pending[name]
        if not self._by_default and name not in map(
            self._registry.name_of, self._registry.on_demand
        ):
            return None
        await self._repository.look_up(name)
        try:
            known, config = await asyncio.to_thread(self._read_config, name)
        except HostError as error:
            _log.debug("'%s' is not loaded for a request: %s", name, error.message)
            return None
        if not loads_on_demand(config, self._by_default) or self._planner.serves(known):
            return None
        if name not in self._pending:
            loading = asyncio.get_running_loop().create_task(self._load(name, known))
            policies = QueuePolicies()
            if config.HasField("dynamic_batching"):
                policies = read_queue_policies(config.dynamic_batching)
            counts = self._counts.setdefault(known, LoadCounts())
            self._pending[name] = _PendingLoad(known, policies, loading, counts)
        return self._pending[name]

    def _read_config(self, name: str) -> tuple[str, ModelConfig]:
        """The qualified name and the configuration file of a model. Blocks. Raises HostError."""
        found = self._repository.qualified_names(name)
        if len(found) != 1:
            raise not_found(f"{len(found)} models have this name")
        return found[0], self._planner.read_unchecked_config(found[0])

    async def _load(self, name: str, known: str) -> HostError | None:
        """Loads a model; returns the error, as several requests may want it."""
        _log.info("loading '%s' for a request", name, extra=model_fields(name))
        counts = self._counts.setdefault(known, LoadCounts())
        try:
            failures = await self._dependencies.start_load([known], LoadRequest(if_missing=True))
            error = failures.get(known)
        except HostError as refusal:
            error = refusal
        finally:
            self._pending.pop(name, None)
        if error is None:
            counts.succeeded += 1
        else:
            counts.failed += 1
        return error

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Adds the loads, and how long requests waited for them."""
        for known, counts in self._counts.items():
            model = ("model", self._registry.name_of(known))
            loads = snapshot["pbhost_on_demand_loads_total"]
            loads.add((model, ("result", "success")), counts.succeeded)
            loads.add((model, ("result", "failure")), counts.failed)
            snapshot["pbhost_on_demand_requests_total"].add((model,), counts.requests)
            snapshot["pbhost_on_demand_wait_seconds_total"].add((model,), counts.waited_s)
            snapshot["pbhost_on_demand_waiting_requests"].add((model,), self._awaited[known])

    async def close(self) -> None:
        """Cancels the loads in progress; requests that wait for them fail."""
        tasks = [pending.task for pending in self._pending.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
