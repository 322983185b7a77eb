"""How the instances of one model version are made: at its load, and whenever one is missing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from host.config import model_config as configuration
from host.config.json_form import to_json
from host.config.model_config import InstanceSpec, ModelConfig
from host.instances.instance import Instance
from host.instances.supervisor import Supervisor
from host.instances.work import Flow
from host.models.python_model import PythonModel
from host.models.warmup import Warmup
from stub.wire.messages import Initialize, ModelSource

Start = Callable[[str, str], Awaitable[Instance]]
"""Starts a stub of one model; its name, and what stands before its lines in the log."""


class Workshop:
    """Makes instances for `model`, out of stubs that `start` brings up."""

    def __init__(
        self,
        model: PythonModel,
        start: Start,
        source: ModelSource,
        arguments: Arguments,
        warmup: Warmup,
    ) -> None:
        self._model = model
        self._start = start
        self._source = source
        self._arguments = arguments
        self._warmup = warmup

    async def furnish(self, stub: Instance, spec: InstanceSpec) -> None:
        """Make a stub that instance: initialised and warmed up. Raises HostError."""
        arguments = self._arguments
        stub.name = spec.name
        stub.label = f"{self._model.name}/{spec.name}"
        await stub.initialize(
            Initialize(
                spec.name,
                self._source,
                arguments.of(spec),
                arguments.outputs,
                arguments.decoupled,
                arguments.overlap,
                arguments.flow.window,
                arguments.flow.seconds,
            )
        )
        stub.work.restore = self._model.signature.restore
        if not spec.passive:
            await self._warmup.run(stub, self._model.new_call, self._model.report)

    def open(self, made: Iterable[tuple[Instance, InstanceSpec]]) -> None:
        """Have these instances take the model's work, unless they are passive."""
        lanes = [self._lane(stub, spec) for stub, spec in made]
        self._model.lanes += lanes
        for lane in lanes:
            lane.join()

    def _lane(self, stub: Instance, spec: InstanceSpec) -> Supervisor:
        label = stub.label  # and not the stub itself, which may die long before its lane

        async def launch() -> Instance:
            return await self._launch(spec, label)

        model = self._model
        return Supervisor(stub, launch, model.scheduler, model.report, spec.passive)

    async def _launch(self, spec: InstanceSpec, label: str) -> Instance:
        fresh = await self._start(spec.name, label)
        try:
            await self.furnish(fresh, spec)
        except BaseException:  # also if cancelled: nobody else would end this process
            fresh.kill()
            raise
        return fresh


class Arguments:
    """What `initialize` is called with (pb_utils spec 2.3)."""

    def __init__(self, directory: Path, version: int, config: ModelConfig, flow: Flow) -> None:
        self.outputs = [output.name for output in config.output]
        self.decoupled = bool(config.model_transaction_policy.decoupled)
        self.overlap = configuration.overlap(config)
        self.flow = flow
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
