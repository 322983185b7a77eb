"""Keeps the memory of all models within a budget: loads wait for room, and idle models make it.

Source: docs/reference/configuration-and-scheduling.md, "The memory budget".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from host.config import model_config as configuration
from host.config.load_parameters import stated_gpu_memory, stated_memory
from host.config.model_config import ModelConfig
from host.errors import HostError, unavailable
from host.metrics.catalogue import MetricsSnapshot
from host.model_control.eviction import Evictions
from host.model_control.memory_usage import HOST, Memory, ModelMemory, gpu_name
from host.repository.repository import Fingerprint

_log = logging.getLogger("pbhost")

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
        gpus = {
            spec.device_id for spec in configuration.instance_specs(config) if spec.kind == "GPU"
        }
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
