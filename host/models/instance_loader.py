"""Loads model versions that run in instances, of all backends."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from host.cache.responses import ResponseCache, ResponseStore
from host.config.auto_complete import complete_config
from host.config.instance_groups import InstanceSpec, instance_specs
from host.config.json_form import to_json
from host.config.model_config import ConfigSettings, LoadedConfig, load_config
from host.config.parameters import input_memory_message, wants_preload
from host.config.schema import ModelConfig, is_ensemble
from host.environments.environment import Environment
from host.environments.model_environments import Environments
from host.errors import invalid_argument
from host.instances.flow_control import FlowControlSettings
from host.instances.instance import Instance
from host.instances.pool import PreparedModel, StubPool
from host.instances.regions import write_outputs
from host.logs.formats import Label, model_fields
from host.metrics.latency import MetricsSettings
from host.models.backends import Backends
from host.models.instance_factory import (
    InstanceFactory,
    InstancePlan,
    Start,
    preload_arguments,
)
from host.models.loaders import InstanceUpdate, LendableSemaphore
from host.models.python_model import PythonModel
from host.models.registry import LoadedModel
from host.models.warmup import Warmup
from host.options.validators import HostPolicies
from host.repository.model_directory import list_versions, read_labels, select_versions
from host.scheduling.rate_limiter import RateLimiter
from host.scheduling.sequence_call import read_states
from stub.wire.messages import ModelSource, PreloadJob

_log = logging.getLogger("pbhost")


class Loader:
    """Loads versions that run in stubs.

    `auto_complete`: whether models may complete their configuration. `flow`: when a response sender
    has to wait. `debugged`: the model whose only instance runs on the terminal. `store`: the
    response cache. `limiter`: the rate limiter. `policies`: CPUs and memory of instances.
    `initializing`: slots that instances of all models hold while they initialise.
    `quarantine_seconds`: for which a request that has killed two stubs is refused; 0 for never.
    """

    def __init__(
        self,
        pool: StubPool,
        backends: Backends,
        environments: Environments,
        *,
        auto_complete: bool,
        flow: FlowControlSettings,
        metrics: MetricsSettings | None = None,
        debugged: str = "",
        store: ResponseStore | None = None,
        limiter: RateLimiter | None = None,
        policies: HostPolicies | None = None,
        initializing: LendableSemaphore | None = None,
        quarantine_seconds: float = 0.0,
    ) -> None:
        self._quarantine_seconds = quarantine_seconds
        self._policies = policies or {}
        self._initializing = initializing or LendableSemaphore(0)
        self._debugged = debugged
        self._store = store
        self._factories: WeakKeyDictionary[LoadedModel, InstanceFactory] = WeakKeyDictionary()
        self._limiter = limiter
        self._metrics = metrics
        self._pool = pool
        self._environments = environments
        self._flow = flow
        self._backends = backends
        self._auto_complete = auto_complete

    async def load_version(
        self, directory: Path, version: int, loaded: LoadedConfig
    ) -> PythonModel:
        """Returns a model whose instances are all initialised. Raises HostError."""
        begun = time.monotonic()
        source, loaded = await asyncio.to_thread(
            self._backends.find_backend, directory, version, loaded
        )
        loaded.check_instances()
        label = Label(loaded.config.name, version)
        environment = await self._environments.prepare(loaded.config, directory)
        prepared: PreparedModel | None = None
        stubs: list[Instance] = []
        plans: list[InstancePlan] = []
        try:
            prepared = await self._prepare(label, loaded.config, source, environment)
            start = partial(
                self._pool.start_instance,
                environment=environment,
                attached=label.model == self._debugged,
                launcher=None if prepared is None else prepared.launcher,
                warnings=set(),
            )
            # Auto-completion cannot change the number of instances, so that all can start at once.
            starts = (start(label) for _ in self._instances(loaded.config))
            started = await asyncio.gather(*starts, return_exceptions=True)
            stubs += [stub for stub in started if isinstance(stub, Instance)]
            _raise_first_error(started)
            config = await self._complete(loaded, source, stubs, start)
            model = await self._make_model(directory, version, config, loaded.namespace)
            warmup = await asyncio.to_thread(Warmup, config, directory, model.signature)
            factory = InstanceFactory(
                model,
                start,
                source,
                self._flow,
                warmup,
                self._limiter,
                self._policies,
                self._initializing,
            )
            plans += factory.plan_instances(self._instances(config))
            await _run_steps(map(factory.initialize, stubs, plans))
        except BaseException:  # also if cancelled, as these processes have no other owner
            for stub in stubs:
                stub.kill()
            for plan in plans:
                plan.close()
            try:
                if prepared is not None:
                    await prepared.close()
            finally:
                if environment is not None:
                    environment.release()
            raise
        model.prepared = prepared
        model.environment = environment
        factory.start_accepting(zip(stubs, plans, strict=True))
        self._factories[model] = factory
        model.metrics.load_seconds = time.monotonic() - begun
        return model

    async def _prepare(
        self,
        label: Label,
        config: ModelConfig,
        source: ModelSource,
        environment: Environment | None,
    ) -> PreparedModel | None:
        """The process that the stubs are forks of; None if each starts by itself."""
        if label.model == self._debugged:
            return None
        if not await asyncio.to_thread(is_prepared, config, source):
            return None
        job = PreloadJob(source, preload_arguments(config, source))
        return await self._pool.prepare_model(label, msgspec.json.encode(job), environment)

    async def _make_model(
        self, directory: Path, version: int, config: ModelConfig, namespace: str
    ) -> PythonModel:
        """The model of a complete configuration, without instances. Raises HostError."""
        labels = await asyncio.to_thread(read_labels, directory, config)
        if message := input_memory_message(config):
            _log.info("%s", message, extra=model_fields(config.name, version))
        states = await asyncio.to_thread(read_states, config, directory)
        model = PythonModel(config, version, self._metrics, labels, states)
        model.metrics.set_namespace(namespace)
        if self._quarantine_seconds:
            model.set_quarantine(self._quarantine_seconds)
        if self._store is not None and config.response_cache.enable:
            model.cache = ResponseCache(
                self._store, version, model.counters, write_outputs, namespace
            )
        return model

    async def update(
        self, model: LoadedModel, loaded: LoadedConfig, finalize: float
    ) -> InstanceUpdate | None:
        """Prepares the instances that `loaded` asks for. Raises HostError.

        None for a debugged model, which is loaded again.
        """
        factory = self._factories.get(model)
        if factory is None or model.name == self._debugged:
            return None
        loaded.check_instances()
        return await factory.plan_change(loaded.config, finalize)

    def _instances(self, config: ModelConfig) -> list[InstanceSpec]:
        """The instances to run; only one for a debugged model, as there is one terminal."""
        specs = instance_specs(config)
        return specs[:1] if config.name == self._debugged else specs

    async def _complete(
        self,
        loaded: LoadedConfig,
        source: ModelSource,
        stubs: list[Instance],
        start: Start,
    ) -> ModelConfig:
        """The final configuration, completed by the model.

        A stub whose model completed something is replaced, so that instances do not see what the
        completion left behind. A stub whose model completed nothing has only imported it, and is
        used.
        """
        if not self._auto_complete:
            return complete_config(loaded)
        completed = await stubs[0].auto_complete(source, to_json(loaded.config))
        config = complete_config(loaded, completed)
        if completed is not None:
            described = stubs[0]
            stubs[0] = await start(described.label)
            await described.stop(0, 5.0)
        return config


async def _run_steps(steps: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Awaits all steps to their ends, at once unless that is turned off. Raises the first error."""
    if os.environ.get("TRITON_PARALLEL_INSTANCE_LOADING") == "0":
        for step in steps:
            await step
    else:
        _raise_first_error(await asyncio.gather(*steps, return_exceptions=True))


def _raise_first_error(results: Iterable[object]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result


_STATIC_PRELOAD = re.compile(rb"^[ \t]+@staticmethod\s+def[ \t]+preload\b", re.MULTILINE)
_MAX_SOURCE_BYTES = 1 << 24


def is_prepared(config: ModelConfig, source: ModelSource) -> bool:
    """Whether a model is prepared: its configuration says so, or its code has `preload`. Blocks."""
    wanted = wants_preload(config)
    if wanted is not None:
        return wanted
    folder = source.backend or os.path.join(source.directory, str(source.version))
    try:
        with open(os.path.join(folder, source.file), "rb") as file:
            return _STATIC_PRELOAD.search(file.read(_MAX_SOURCE_BYTES)) is not None
    except OSError:  # the stub says what is wrong with the file
        return False


def read_model(
    directory: Path,
    version: int | None = None,
    *,
    backend_directory: str = "",
    gpus: Sequence[int] = (),
    least_capability: float = 0.0,
) -> tuple[ModelSource, LoadedConfig]:
    """Reads the configuration of a model, and finds its version and its backend.

    `version`: None for the one that clients of a server get. `gpus`, `least_capability`: as for
    `load_config`. Raises HostError.
    """
    settings = ConfigSettings(gpus=gpus, least_capability=least_capability)
    loaded = load_config(directory, settings)
    if is_ensemble(loaded.config):
        raise invalid_argument(
            f"model '{loaded.config.name}' is an ensemble, so it has no code to run"
        )
    chosen = _choose_version(directory, loaded, version)
    return Backends(Path(backend_directory)).find_backend(directory, chosen, loaded)


def describe_model(source: ModelSource, loaded: LoadedConfig) -> Mapping[str, Any]:
    """Returns what `pb_utils.testing.load` needs: directory, version, backend and config."""
    return {
        "directory": source.directory,
        "version": source.version,
        "backend": source.backend,
        "config": to_json(loaded.config),
    }


def _choose_version(directory: Path, loaded: LoadedConfig, wanted: int | None) -> int:
    """Returns the wanted version, by default the one that clients get. Raises HostError."""
    available = list_versions(directory)
    if wanted is None:
        return select_versions(loaded.config, available)[-1]
    if wanted not in available:
        found = ", ".join(map(str, available)) or "none"
        raise invalid_argument(
            f"model '{loaded.config.name}' has no version {wanted}; its versions are: {found}"
        )
    return wanted
