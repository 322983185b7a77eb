"""How the instances of one model version are made: at its load, and whenever one is missing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from host.config import model_config as configuration
from host.config.json_form import to_json
from host.config.model_config import InstanceSpec, ModelConfig
from host.errors import HostError
from host.instances.instance import Instance
from host.instances.supervisor import Supervisor
from host.instances.work import Flow
from host.log_lines import Label
from host.models.python_model import PythonModel
from host.models.warmup import Warmup
from host.scheduling.gate import LimitedGate
from host.scheduling.queue import LaneQueue
from host.scheduling.rate_limiter import Need, Permit, RateLimiter, Resource
from host.scheduling.scheduler import Lane
from stub.wire.messages import Initialize, ModelSource

Start = Callable[[str, Label], Awaitable[Instance]]
"""Starts a stub of one model; its name, and what stands before its lines in the log."""


@dataclass(frozen=True, slots=True)
class Place:
    """An instance that is to be, and its permit if executions are limited."""

    spec: InstanceSpec
    permit: Permit | None = None

    def close(self) -> None:
        """It will not be."""
        if self.permit is not None:
            self.permit.close()


class Workshop:
    """Makes instances for `model`, out of stubs that `start` brings up.

    With a `limiter`, whatever they do needs resources.
    """

    def __init__(
        self,
        model: PythonModel,
        start: Start,
        source: ModelSource,
        arguments: Arguments,
        warmup: Warmup,
        limiter: RateLimiter | None,
    ) -> None:
        self._model = model
        self._start = start
        self._source = source
        self._arguments = arguments
        self._warmup = warmup
        self._limiter = limiter
        if limiter is not None and isinstance(model.scheduler, LaneQueue):
            model.scheduler.gate = LimitedGate(_permit_of, model.scheduler.dispatch)

    def places(self, specs: Iterable[InstanceSpec]) -> list[Place]:
        """What is needed for these instances. Raises HostError if one of them could never run."""
        places: list[Place] = []
        try:
            for spec in specs:
                limited = self._limiter is not None and not spec.passive
                places.append(Place(spec, self._permit(spec) if limited else None))
        except HostError:
            for place in places:
                place.close()
            raise
        return places

    def _permit(self, spec: InstanceSpec) -> Permit:
        assert self._limiter is not None
        wanted = self._model.config.instance_group[spec.group].rate_limiter
        resources = [Resource(r.name, r.count, getattr(r, "global")) for r in wanted.resources]
        return self._limiter.permit(Need(resources, spec.device_id, wanted.priority))

    async def furnish(self, stub: Instance, place: Place) -> None:
        """Make a stub that instance: initialised and warmed up. Raises HostError."""
        if place.permit is None:
            await self._furnish(stub, place.spec)
            return
        async with place.permit.held():
            await self._furnish(stub, place.spec)

    async def _furnish(self, stub: Instance, spec: InstanceSpec) -> None:
        arguments = self._arguments
        stub.name = spec.name
        stub.label = Label(self._model.name, self._model.version, spec.name)
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

    def open(self, made: Iterable[tuple[Instance, Place]]) -> None:
        """Have these instances take the model's work, unless they are passive."""
        lanes = [self._lane(stub, place) for stub, place in made]
        self._model.lanes += lanes
        for lane in lanes:
            lane.join()

    def _lane(self, stub: Instance, place: Place) -> Supervisor:
        label = stub.label  # and not the stub itself, which may die long before its lane

        async def launch() -> Instance:
            return await self._launch(place, label)

        model = self._model
        passive = place.spec.passive
        return Supervisor(stub, launch, model.scheduler, model.report, passive, place.permit)

    async def _launch(self, place: Place, label: Label) -> Instance:
        fresh = await self._start(place.spec.name, label)
        try:
            await self.furnish(fresh, place)
        except BaseException:  # also if cancelled: nobody else would end this process
            fresh.kill()
            raise
        return fresh


def _permit_of(lane: Lane) -> Permit:
    assert isinstance(lane, Supervisor) and lane.permit is not None
    return lane.permit


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
