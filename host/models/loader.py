"""Brings one version of a Python model up: described, configured, initialised, on its lanes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import TypeVar

from host.config import model_config as configuration
from host.config.json_form import to_json
from host.config.model_config import InstanceSpec, LoadedConfig, ModelConfig
from host.instances.instance import Instance
from host.instances.pool import StubPool
from host.instances.supervisor import Supervisor
from host.models.backends import Backends
from host.models.python_model import PythonModel
from stub.wire.messages import ModelSource

_Result = TypeVar("_Result")


class Loader:
    """`auto_complete`: whether models may complete their configuration."""

    def __init__(self, pool: StubPool, backends: Backends, *, auto_complete: bool) -> None:
        self._pool = pool
        self._backends = backends
        self._auto_complete = auto_complete

    async def load(self, directory: Path, version: int, loaded: LoadedConfig) -> PythonModel:
        """A model whose instances are all initialised. Raises HostError."""
        name: str = loaded.config.name
        source, loaded = await asyncio.to_thread(self._backends.find, directory, version, loaded)
        # Auto-completion cannot change the number of instances, so all can start at once.
        count = len(configuration.instances(loaded.config))
        stubs = await _all(self._pool.start("", name) for _ in range(count))
        try:
            config = await self._complete(loaded, source, stubs)
            specs = configuration.instances(config)
            arguments = Arguments(directory, version, config)
            await self._initialize(specs, stubs, source, arguments)
        except BaseException:
            for stub in stubs:
                stub.kill()
            raise
        return self._assemble(config, version, specs, stubs, source, arguments)

    async def _complete(
        self, loaded: LoadedConfig, source: ModelSource, stubs: list[Instance]
    ) -> ModelConfig:
        """The final configuration, with the model's own additions.

        A stub whose model completed something is replaced: what its completion left behind must
        not be seen by the instance. If it completes nothing, it has only been imported.
        """
        if not self._auto_complete:
            return configuration.finish(loaded, None)
        text = await stubs[0].describe(source, to_json(loaded.config))
        completed = None if text is None else json.loads(text)
        config = configuration.finish(loaded, completed)
        if completed is not None:
            described = stubs[0]
            stubs[0] = await self._pool.start("", loaded.config.name)
            await described.stop(0, 5.0)
        return config

    async def _initialize(
        self,
        specs: list[InstanceSpec],
        stubs: list[Instance],
        source: ModelSource,
        arguments: Arguments,
    ) -> None:
        steps = [
            _become(stub, spec, source, arguments) for stub, spec in zip(stubs, specs, strict=True)
        ]
        if os.environ.get("TRITON_PARALLEL_INSTANCE_LOADING") == "0":
            for step in steps:
                await step
        else:
            await _all(steps)

    def _assemble(
        self,
        config: ModelConfig,
        version: int,
        specs: list[InstanceSpec],
        stubs: list[Instance],
        source: ModelSource,
        arguments: Arguments,
    ) -> PythonModel:
        model = PythonModel(config, version)

        restore = model.signature.restore

        def lane(stub: Instance, spec: InstanceSpec) -> Supervisor:
            stub.restore = restore
            label = stub.label  # and not the stub itself, which may die long before its lane

            async def launch() -> Instance:
                fresh = await self._pool.start(spec.name, label)
                try:
                    await _become(fresh, spec, source, arguments)
                except BaseException:
                    fresh.kill()
                    raise
                fresh.restore = restore
                return fresh

            return Supervisor(stub, launch, model.scheduler, model.report)

        model.lanes = [lane(stub, spec) for stub, spec in zip(stubs, specs, strict=True)]
        for supervisor in model.lanes:
            supervisor.join()
        return model


class Arguments:
    """What `initialize` is called with (pb_utils spec 2.3)."""

    def __init__(self, directory: Path, version: int, config: ModelConfig) -> None:
        self.outputs = [output.name for output in config.output]
        self._common = {
            "model_config": to_json(config),
            "model_repository": str(directory),
            "model_version": str(version),
            "model_name": config.name,
        }

    def of(self, spec: InstanceSpec) -> dict[str, str]:
        """The arguments of one instance."""
        return {
            **self._common,
            "model_instance_kind": spec.kind,
            "model_instance_name": spec.name,
            "model_instance_device_id": str(spec.device_id),
        }


async def _become(
    stub: Instance, spec: InstanceSpec, source: ModelSource, arguments: Arguments
) -> None:
    stub.name = spec.name
    stub.label = f"{arguments.of(spec)['model_name']}/{spec.name}"
    await stub.initialize(source, arguments.of(spec), arguments.outputs)


async def _all(steps: Iterable[Awaitable[_Result]]) -> list[_Result]:
    """Run all steps to their ends; then raise the first error, if there was one."""
    results = await asyncio.gather(*steps, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        for result in results:
            if isinstance(result, Instance):
                result.kill()
        raise errors[0]
    return [result for result in results if not isinstance(result, BaseException)]
