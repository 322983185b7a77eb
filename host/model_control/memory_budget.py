"""The memory budget of models: usage, admission of loads, and eviction of idle models.

Source: docs/reference/model-control.md, "The memory budget".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from host.config.instance_groups import instance_specs
from host.config.parameters import is_pinned, stated_gpu_memory, stated_memory
from host.config.schema import ModelConfig
from host.environments.program import ProgramError
from host.errors import HostError, unavailable
from host.instances.gpus import GpuMemory
from host.logs.formats import model_fields
from host.metrics.families import MetricsSnapshot
from host.model_control.dependencies import EnsembleDependencies
from host.models.registry import ModelVersion, Registry, VersionState
from host.repository.fingerprint import Fingerprint
from host.system.resources import processes_of_groups, proportional_bytes

_log = logging.getLogger("pbhost")

HOST = "host"
"""The name of the host's memory, beside those of GPUs: "gpu0", "gpu1" and so on."""

Memory = dict[str, int]
"""Bytes by device: `HOST`, or the name of a GPU."""

ModelMemory = dict[str, Memory]
"""The memory of each model that has processes, by the model's name."""


def gpu_name(number: int) -> str:
    """The name of a GPU among devices."""
    return f"gpu{number}"


class MemoryUsage:
    """Measures the processes of all models, with those that models have started themselves.

    Belongs to the event loop. `process_ids`: those of stubs by the name of the model.
    `read_gpu_memory`: None if no GPU is of interest.
    """

    def __init__(
        self,
        process_ids: Callable[[], dict[str, list[int]]],
        read_gpu_memory: Callable[[], Awaitable[GpuMemory]] | None,
    ) -> None:
        self._process_ids = process_ids
        self._read_gpu_memory = read_gpu_memory
        self._lock = asyncio.Lock()
        self._began = 0  # when the last measurement began, in nanoseconds, monotonic
        self.last: ModelMemory = {}
        """The last measurement."""

    async def measure(self) -> ModelMemory:
        """The memory of each model now: no measurement that began before the call.

        Callers that ask while another measurement runs share the next one.
        """
        asked = time.monotonic_ns()
        async with self._lock:
            if self._began <= asked:
                began = time.monotonic_ns()
                gpus = await self._measure_gpus()
                stubs = self._process_ids()
                self.last = await asyncio.to_thread(_measure_processes, stubs, gpus)
                self._began = began
            return self.last

    async def _measure_gpus(self) -> GpuMemory:
        if self._read_gpu_memory is None:
            return {}
        try:
            return await self._read_gpu_memory()
        except ProgramError as error:
            _log.error("the memory of GPUs is unknown, and counts as unused: %s", error.details)
            return {}


def _measure_processes(stubs: dict[str, list[int]], gpus: GpuMemory) -> ModelMemory:
    groups = processes_of_groups({pid for pids in stubs.values() for pid in pids})
    found: ModelMemory = {}
    for name, leaders in stubs.items():
        memory = found[name] = {HOST: 0}
        for pid in (pid for leader in leaders for pid in {leader, *groups[leader]}):
            memory[HOST] += proportional_bytes(pid)
            for number, used in gpus.get(pid, {}).items():
                memory[gpu_name(number)] = memory.get(gpu_name(number), 0) + used
    return found


class Evictions:
    """Unloads idle models that the next request can load again. Belongs to the event loop.

    `is_awaited`: whether a request waits for this model. `bls_waits`: the models that requests of
    models wait for until they are loaded, by the model that asks.
    """

    def __init__(
        self,
        registry: Registry,
        dependencies: EnsembleDependencies,
        is_awaited: Callable[[str], bool],
        bls_waits: Callable[[], dict[str, set[str]]],
    ) -> None:
        self._registry = registry
        self._dependencies = dependencies
        self._is_awaited = is_awaited
        self._bls_waits = bls_waits
        self.counts: Counter[str] = Counter()
        """How often each model was unloaded to make room."""

    def find_victims(self) -> list[str]:
        """The models that can be unloaded now, least recently used first."""
        loading = self._dependencies.models_in_progress()
        found = [
            (max(map(self._last_used, self._with_users(name))), name)
            for name, entry in self._registry.list_entries()
            if any(version.state is VersionState.READY for version in entry.versions.values())
            and not any(
                one in loading or self.reason_to_keep(one) or self._is_in_use(one)
                for one in self._with_users(name)
            )
        ]
        return [name for _, name in sorted(found)]

    def find_leaving(self) -> set[str]:
        """The models that are being unloaded, so that their memory will be free soon."""
        leaving = self._dependencies.lifecycle.retiring_models()
        return {name for name in leaving if not self._ready_versions(name)}

    def reason_to_keep(self, name: str) -> str:
        """Why a model that serves is never unloaded to make room; "" if it may be, or is not."""
        versions = self._ready_versions(name)
        if not versions:
            return ""
        if any(version.model and is_pinned(version.model.config) for version in versions):
            return "pinned"
        if name not in self._registry.on_demand:
            return "does not load on demand"
        if self._dependencies.lifecycle.has_override(name):
            return "has a configuration or files from a client"
        return ""

    def find_waiters(self, name: str) -> set[str]:
        """The models whose requests, or whose own loads, wait for the load of this one."""
        lifecycle = self._dependencies.lifecycle
        waiters = {caller for caller, awaited in self._bls_waits().items() if name in awaited}
        waiters |= {
            other
            for other, _ in self._registry.list_entries()
            if lifecycle.limiter.find_wait_chain(other, name)
        }
        return waiters - {name}

    def find_holders(self, name: str) -> set[str]:
        """The models that serve, and stay loaded until the load of this one has ended.

        They wait for it, or an ensemble needs them beside it. So does the model itself, if it is
        loaded again.
        """
        together = self._dependencies.models_in_progress_with(name)
        holders = self.find_waiters(name) | together | {name}
        return {holder for holder in holders if self._ready_versions(holder)}

    def evict(self, name: str) -> None:
        """Starts to unload a model and the ensembles that use it."""
        self.counts[name] += 1
        _log.info(
            "unloading '%s' to make room in the memory budget", name, extra=model_fields(name)
        )
        for one in self._with_users(name):
            self._dependencies.lifecycle.unload(one)

    def _with_users(self, name: str) -> list[str]:
        """A model, and the ensembles that use it, directly or not, and serve."""
        names = [name]
        for one in names:  # grows meanwhile
            names += [
                user
                for user in self._dependencies.graph.dependents_of(one)
                if user not in names and self._ready_versions(user)
            ]
        return names

    def _ready_versions(self, name: str) -> list[ModelVersion]:
        versions: Iterable[ModelVersion] = self._registry.versions(name).values()
        return [version for version in versions if version.state is VersionState.READY]

    def _is_in_use(self, name: str) -> bool:
        return self._is_awaited(name) or any(
            version.model is not None and version.model.in_use
            for version in self._registry.versions(name).values()
        )

    def _last_used(self, name: str) -> float:
        """When the model ran last or was loaded, in seconds since 1970 UTC."""
        return max(
            (
                max(version.since, version.model.metrics.counters.snapshot().last_inference / 1000)
                for version in self._ready_versions(name)
                if version.model is not None
            ),
            default=0.0,
        )


_LOOK_SECONDS = 0.05
"""How long a load that waits for room waits until it looks again."""

_WATCH_SECONDS = 5.0
"""How often the memory of models is measured while none loads, as loaded models may grow."""


@dataclass(eq=False, slots=True)
class _Load:
    """A load, from its request for room to its end.

    Attributes:
        name: The model.
        need: What the load will add; None if that is not known.
        makes_versions: Whether versions are loaded, not only instances changed.
        promised: Whether models are being unloaded for this load.
        started: Whether it has got its room.
        before: What the model used then, if versions of it serve or are being unloaded.
        alone: Whether none of them was being unloaded, so that the growth can be measured.
    """

    name: str
    need: Memory | None
    makes_versions: bool
    promised: bool = False
    started: bool = False
    before: Memory = field(default_factory=dict)
    alone: bool = True

    def growth_left(self, used: Mapping[str, int]) -> Memory:
        """What the load will still add to what its model uses now."""
        return {
            device: max(0, most - max(0, used.get(device, 0) - self.before.get(device, 0)))
            for device, most in (self.need or {}).items()
        }


class MemoryBudget:
    """Admits loads. Belongs to the event loop.

    `limits`: bytes by device. `measure`: measures all models. `timeout`: the most seconds that a
    load waits for room. The need of a model is what its configuration states, else what it used
    when it was loaded last; a load whose need is not known waits for other such loads.
    """

    def __init__(
        self,
        limits: Memory,
        measure: Callable[[], Awaitable[ModelMemory]],
        evictions: Evictions,
        timeout: float,
    ) -> None:
        self._limits = limits
        self._measure = measure
        self._evictions = evictions
        self._timeout = timeout
        self._loads: list[_Load] = []  # in the order of their requests
        self._needs: dict[str, tuple[Fingerprint | None, Memory]] = {}
        self._used: ModelMemory = {}
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    @asynccontextmanager
    async def admit(
        self, name: str, config: ModelConfig, files: Fingerprint | None, versions: int
    ) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Waits until there is room for a load, which runs inside of this context.

        `files`: the state of the model's files; what a model needed before holds for equal ones.
        `versions`: how many versions are loaded, 0 if only their instances change. Returns what the
        load calls when its instances are made: that measures them and makes room for what was not
        foreseen. Both raise HostError UNAVAILABLE, with the sum, if the model cannot fit, or if it
        does not within the timeout.
        """
        load = _Load(name, self._known_need(name, config, files, versions), versions > 0)
        self._loads.append(load)
        try:
            await self._wait_for_room(load)

            async def settle() -> None:
                await self._settle(load, files)

            yield settle
        finally:
            self._loads.remove(load)

    def _known_need(
        self, name: str, config: ModelConfig, files: Fingerprint | None, versions: int
    ) -> Memory | None:
        """What a load will add, by device; None if that is not known."""
        if not versions:
            return None
        known_files, need = self._needs.get(name, (None, None))
        if need is not None and known_files != files:
            need = None
        stated = {HOST: stated_memory(config) * versions}
        gpus = {spec.device_id for spec in instance_specs(config) if spec.kind == "GPU"}
        stated |= {gpu_name(gpu): stated_gpu_memory(config) * versions for gpu in gpus}
        stated = {device: size for device, size in stated.items() if size}
        return {**(need or {}), **stated} if need is not None or stated else None

    # Admission

    async def _wait_for_room(self, load: _Load) -> None:
        deadline = time.monotonic() + self._timeout
        await self._measure_all()
        while not self._fits_now(load):
            self._make_room(load)
            if time.monotonic() > deadline:
                raise unavailable(
                    f"no room for model '{load.name}' within {self._timeout:g} s:"
                    f" {self._sum(load, self._used)}"
                )
            await asyncio.sleep(_LOOK_SECONDS)
            await self._measure_all()
        load.started = True
        load.before = self._used.get(load.name, {})
        load.alone = load.name not in self._evictions.find_leaving()

    async def _measure_all(self) -> ModelMemory:
        self._used = await self._measure()
        return self._used

    def _fits_now(self, load: _Load) -> bool:
        """Whether there is room, with all memory that is in use and that others will get."""
        if load.need is None:
            waiters = self._evictions.find_waiters(load.name)
            for other in self._loads:
                if other.started and other.need is None and other.name not in waiters:
                    return False
        total = add([*self._used.values(), *self._promised_to_others(load), load.need or {}])
        return self._is_within(total)

    def _promised_to_others(self, load: _Load) -> list[Memory]:
        """What other loads will still take."""
        return [
            other.growth_left(self._used.get(other.name, {}))
            for other in self._loads
            if other is not load and (other.started or other.promised)
        ]

    def _make_room(self, load: _Load) -> None:
        """Unloads idle models if that is enough for the load. Raises HostError if nothing can be.

        Otherwise nothing is unloaded, as models in use may become idle.
        """
        self._raise_if_stuck(load)
        total = add([self._staying(), *self._promised_to_others(load), load.need or {}])
        victims = self._choose_victims(total)
        load.promised = self._is_within(subtract(total, self._used_by(victims)))
        if load.promised:
            for name in victims:
                self._evictions.evict(name)

    def _used_by(self, names: Iterable[str]) -> Memory:
        return add(self._used.get(name, {}) for name in names)

    def _staying(self) -> Memory:
        """The memory of all models but those that are being unloaded."""
        return self._used_by(self._used.keys() - self._evictions.find_leaving())

    def _choose_victims(self, total: Memory) -> list[str]:
        """Idle models without which `total` is within the budget, or all that help to get there."""
        chosen: list[str] = []
        for name in self._evictions.find_victims():
            beyond = self._devices_beyond_limit(total)
            used = self._used.get(name, {})
            if any(used.get(device, 0) for device in beyond):
                chosen.append(name)
                total = subtract(total, used)
        return chosen

    def _raise_if_stuck(self, load: _Load) -> None:
        """Raises HostError if the load waits for models that cannot be unloaded before its end."""
        held = self._find_held([load])
        if not self._is_within(self._with_held(load, held)):
            raise self._refusal(load, held)
        waiting = [other for other in self._loads if not other.started]
        if waiting[-1] is not load:
            return  # one that asked for room later gives way
        held = self._find_held(waiting)
        if not any(self._is_within(self._with_held(other, held)) for other in waiting):
            raise self._refusal(load, held)

    def _find_held(self, loads: Iterable[_Load]) -> dict[str, str]:
        """The models that stay loaded until one of these loads has ended, and why."""
        held = {
            name: reason for name in self._used if (reason := self._evictions.reason_to_keep(name))
        }
        for load in loads:
            for name in self._evictions.find_holders(load.name) & self._used.keys():
                reason = f"needs '{load.name}', or is needed with it"
                held.setdefault(name, "serves until then" if name == load.name else reason)
        return held

    def _with_held(self, load: _Load, held: Iterable[str]) -> Memory:
        """What a load needs together with the models that stay."""
        return add([load.need or {}, self._used_by(held)])

    def _refusal(self, load: _Load, held: Mapping[str, str]) -> HostError:
        used = {name: self._used[name] for name in held}
        return unavailable(
            f"model '{load.name}' does not fit into the memory budget:"
            f" {self._sum(load, used, held)}"
        )

    def _sum(
        self, load: _Load, used: Mapping[str, Memory], reasons: Mapping[str, str] | None = None
    ) -> str:
        """What a load needs and what others use, as text, for the devices that have too little."""
        need = load.need or {}
        total = add([need, *used.values()])
        texts: list[str] = []
        for device in self._devices_beyond_limit(total) or list(self._limits):
            others = ", ".join(
                f"'{name}' uses {_mib(memory[device])}"
                + (f" ({reasons[name]})" if reasons and name in reasons else "")
                for name, memory in sorted(used.items())
                if memory.get(device)
            )
            wanted = f"it needs {_mib(need[device])}" if device in need else "its need is unknown"
            texts.append(
                f"{device}: {wanted}{', and ' + others if others else ''};"
                f" the budget is {_mib(self._limits[device])}"
            )
        return "; ".join(texts)

    # After the load

    async def _settle(self, load: _Load, files: Fingerprint | None) -> None:
        """Records what a load needed, and makes room for it. Raises HostError if it cannot fit."""
        grown = subtract((await self._measure_all()).get(load.name, {}), load.before)
        if load.alone and load.makes_versions:
            self._needs[load.name] = files, grown
        if not self._is_within(self._staying()):
            load.need = grown
            held = self._find_held([load])
            others = self._used_by(held.keys() - {load.name})
            if not self._is_within(add([load.before, grown, others])):
                raise self._refusal(load, held)
            self._evict_until_within()
        load.need = {}  # all of it is there

    def _evict_until_within(self) -> None:
        for name in self._choose_victims(self._staying()):
            self._evictions.evict(name)

    async def _watch(self) -> None:
        """Measures from time to time, and unloads idle models if loaded ones have grown."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                if not self._is_within(add((await self._measure_all()).values())):
                    self._evict_until_within()
            except Exception:  # a defect of one measurement must not end the watch
                _log.exception("failed to measure the memory of the models")

    # Sums

    def _devices_beyond_limit(self, total: Mapping[str, int]) -> list[str]:
        return [device for device, limit in self._limits.items() if total.get(device, 0) > limit]

    def _is_within(self, total: Mapping[str, int]) -> bool:
        return not self._devices_beyond_limit(total)

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Adds the budget, the memory of models as it was measured last, and the evictions."""
        for device, limit in self._limits.items():
            snapshot["pbhost_memory_budget_bytes"].add((("device", device),), limit)
        for name, memory in sorted(self._used.items()):
            for device, used in memory.items():
                labels = (("model", name), ("device", device))
                snapshot["pbhost_model_memory_bytes"].add(labels, used)
        for name, count in self._evictions.counts.items():
            snapshot["pbhost_model_evictions_total"].add((("model", name),), count)

    async def close(self) -> None:
        """Stops to measure. Loads in progress have ended before."""
        self._watcher.cancel()
        await asyncio.wait([self._watcher])


def add(parts: Iterable[Mapping[str, int]]) -> Memory:
    """The sum of parts, by device."""
    total: Memory = {}
    for part in parts:
        for device, size in part.items():
            total[device] = total.get(device, 0) + size
    return total


def subtract(whole: Mapping[str, int], part: Mapping[str, int]) -> Memory:
    """The rest of a sum without a part of it, by device; never less than 0."""
    return {device: max(0, size - part.get(device, 0)) for device, size in whole.items()}


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
