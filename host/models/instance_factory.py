"""Makes the instances of one model version: at its load, and when one must be replaced."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from host.config.instance_groups import InstanceSpec, instance_specs
from host.config.json_form import to_json
from host.config.parameters import max_concurrent_batches, max_initializing_instances
from host.config.schema import ConfigPart, ModelConfig
from host.errors import HostError
from host.instances.flow_control import FlowControlSettings
from host.instances.instance import Instance
from host.instances.supervisor import Supervisor
from host.logs.formats import Label
from host.models.loaders import LendableSemaphore, copy_updatable
from host.models.python_model import PythonModel
from host.models.warmup import Warmup
from host.options.validators import HostPolicies, HostPolicy, find_policy
from host.scheduling.rate_limiter import Permit, RateLimiter, Resource, ResourceRequest
from host.scheduling.scheduler import InstanceSlot
from stub.wire.messages import Initialize, ModelSource

Start = Callable[[Label], Awaitable[Instance]]
"""Starts a stub; its argument names the instance that it will be, in log lines too."""


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """One instance to be made, and its permit if executions are limited.

    `fingerprint`: instances with equal ones are interchangeable.
    """

    spec: InstanceSpec
    fingerprint: bytes
    policy: HostPolicy
    permit: Permit | None = None

    def close(self) -> None:
        """Gives the permit back, as the instance will not be made."""
        if self.permit is not None:
            self.permit.close()


class InstanceFactory:
    """Makes the instances of `model`; `start` starts a stub.

    `flow`: when a response sender has to wait. `limiter`: the rate limiter if executions need
    resources. `policies`: the host policies. `initializing`: slots that instances of all models
    hold while they initialise.
    """

    def __init__(
        self,
        model: PythonModel,
        start: Start,
        source: ModelSource,
        flow: FlowControlSettings,
        warmup: Warmup,
        limiter: RateLimiter | None,
        policies: HostPolicies,
        initializing: LendableSemaphore,
    ) -> None:
        self._policies = policies
        self._initializing = initializing
        self._own_initializing = LendableSemaphore(max_initializing_instances(model.config))
        self._model = model
        self._start = start
        self._source = source
        self._flow = flow
        self._arguments = InitializeArguments(model.config, source)
        self._warmup = warmup
        self._plans: dict[Supervisor, InstancePlan] = {}
        self._limiter = limiter
        if limiter is not None:
            model.scheduler.limit_executions(_permit_of)

    def plan_instances(
        self, specs: Iterable[InstanceSpec], config: ModelConfig | None = None
    ) -> list[InstancePlan]:
        """The plans of these instances. Raises HostError if one of them could never run.

        `config`: the configuration that they belong to, if it is not the model's.
        """
        groups = (config or self._model.config).instance_group
        plans: list[InstancePlan] = []
        try:
            for spec in specs:
                limited = self._limiter is not None and not spec.passive
                group = groups[spec.group]
                permit = self._permit(spec, group) if limited else None
                policy = find_policy(self._policies, spec.kind, spec.device_id, group.host_policy)
                plans.append(InstancePlan(spec, _instance_fingerprint(group, spec), policy, permit))
        except HostError:
            for plan in plans:
                plan.close()
            raise
        return plans

    def _permit(self, spec: InstanceSpec, group: ConfigPart) -> Permit:
        assert self._limiter is not None
        wanted = group.rate_limiter
        resources = [Resource(r.name, r.count, getattr(r, "global")) for r in wanted.resources]
        return self._limiter.permit(ResourceRequest(resources, spec.device_id, wanted.priority))

    async def initialize(
        self, stub: Instance, plan: InstancePlan, arguments: InitializeArguments | None = None
    ) -> None:
        """Initialises and warms up a stub. Raises HostError."""
        arguments = arguments or self._arguments
        if plan.permit is None:
            await self._initialize(stub, plan, arguments)
            return
        async with plan.permit.held():
            await self._initialize(stub, plan, arguments)

    async def _initialize(
        self, stub: Instance, plan: InstancePlan, arguments: InitializeArguments
    ) -> None:
        spec, policy, config = plan.spec, plan.policy, arguments.config
        stub.label = Label(self._model.name, self._model.version, spec.name)
        message = Initialize(
            spec.name,
            self._source,
            arguments.for_instance(spec),
            [output.name for output in config.output],
            bool(config.model_transaction_policy.decoupled),
            max_concurrent_batches(config),
            self._flow.max_outstanding_responses,
            self._flow.send_timeout,
            tuple(policy.cores),
            policy.node,
        )
        # The slots of all models come last, so that none is held by an instance that still waits.
        # Warm-up needs none: it may wait for models that have to be loaded.
        async with self._own_initializing, self._initializing:
            await stub.initialize(message)
        signature = self._model.signature
        if signature.reshapes_outputs:
            stub.session.restore_shape = signature.restore_output_shape
        if not spec.passive:
            await self._warmup.run(stub, self._model.new_call, self._model.record_batches)

    def start_accepting(self, made: Iterable[tuple[Instance, InstancePlan]]) -> None:
        """Lets these instances take work, except passive ones."""
        supervisors = {self._create_slot(stub, plan): plan for stub, plan in made}
        self._model.supervisors += supervisors
        self._plans.update(supervisors)
        for supervisor in supervisors:
            supervisor.start_accepting()

    async def plan_change(self, wanted: ModelConfig, finalize: float) -> InstanceChange:
        """Makes the instances that `wanted` adds to those of the model. Raises HostError."""
        config = type(wanted)()
        config.CopyFrom(self._model.config)
        copy_updatable(wanted, config)
        surplus = dict(self._plans)
        missing: list[InstanceSpec] = []
        for spec in instance_specs(config):
            fingerprint = _instance_fingerprint(config.instance_group[spec.group], spec)
            same = [
                supervisor
                for supervisor, plan in surplus.items()
                if plan.fingerprint == fingerprint
            ]
            if same:  # the one with that name if there is one
                del surplus[
                    min(same, key=lambda supervisor: surplus[supervisor].spec.name != spec.name)
                ]
            else:
                missing.append(spec)
        stay = {
            (plan.spec.name, plan.spec.device_id)
            for supervisor, plan in self._plans.items()
            if supervisor not in surplus
        }
        arguments = InitializeArguments(config, self._source)
        plans = self.plan_instances([_with_unique_name(spec, stay) for spec in missing], config)
        change = InstanceChange(self, arguments, list(surplus), finalize)
        try:
            for plan in plans:
                change.made.append((await self._launch(plan, arguments), plan))
        except BaseException:  # also if cancelled, as these processes have no other owner
            for plan in plans[len(change.made) :]:
                plan.close()
            await change.discard()
            raise
        return change

    def commit(self, change: InstanceChange) -> None:
        """Lets new instances take work, and lets surplus ones finish theirs."""
        self._model.config = change.arguments.config
        self._arguments = change.arguments
        self.start_accepting(change.made)
        for supervisor in change.surplus:
            del self._plans[supervisor]
            task = self._model.retire_slot(supervisor, change.finalize)
            if task is not None:
                (change.ending if supervisor.idle else change.busy).append(task)

    def _create_slot(self, stub: Instance, plan: InstancePlan) -> Supervisor:
        async def launch() -> Instance:
            return await self._launch(plan, self._arguments)

        model = self._model
        return Supervisor(
            stub,
            launch,
            model.scheduler,
            model.record_batches,
            plan.spec.passive,
            plan.permit,
            model.record_lethal_request,
        )

    async def _launch(self, plan: InstancePlan, arguments: InitializeArguments) -> Instance:
        label = Label(self._model.name, self._model.version, plan.spec.name)
        fresh = await self._start(label)
        try:
            await self.initialize(fresh, plan, arguments)
        except BaseException:  # also if cancelled, as this process has no other owner
            fresh.kill()
            raise
        return fresh


@dataclass(slots=True)
class InstanceChange:
    """New instances of a model that serves, which take no work yet, and surplus instances.

    `finalize`: seconds that `finalize` of a surplus instance may take.
    """

    factory: InstanceFactory
    arguments: InitializeArguments
    surplus: list[Supervisor]
    finalize: float
    made: list[tuple[Instance, InstancePlan]] = field(default_factory=list)
    ending: list[asyncio.Task[None]] = field(default_factory=list)
    busy: list[asyncio.Task[None]] = field(default_factory=list)

    def commit(self) -> Collection[asyncio.Task[None]]:
        """Puts the change into effect."""
        self.factory.commit(self)
        return self.busy

    async def wait_ended(self) -> None:
        """Waits until the surplus instances that were idle have ended."""
        if self.ending:
            await asyncio.wait(self.ending)

    async def discard(self) -> None:
        """Stops the new instances and leaves the model as it was."""
        for stub, plan in self.made:
            await stub.stop(0, self.finalize)
            plan.close()


def _instance_fingerprint(group: ConfigPart, spec: InstanceSpec) -> bytes:
    """Identifies what an instance is made from; instances with equal values are interchangeable.

    Source: docs/reference/scheduling.md, "Updating instances in place".
    """
    rest = type(group)()
    rest.CopyFrom(group)
    rest.ClearField("name")
    rest.ClearField("count")
    content: bytes = rest.SerializeToString(deterministic=True)
    return content + b" %d" % spec.device_id


def _with_unique_name(spec: InstanceSpec, taken: set[tuple[str, int]]) -> InstanceSpec:
    """The instance with a name that no other one on its device has."""
    names = (f"{spec.name}_{number}" for number in itertools.count())
    device = spec.device_id
    name = next(n for n in itertools.chain([spec.name], names) if (n, device) not in taken)
    taken.add((name, device))
    return replace(spec, name=name)


def _permit_of(supervisor: InstanceSlot) -> Permit:
    assert isinstance(supervisor, Supervisor) and supervisor.permit is not None
    return supervisor.permit


def preload_arguments(config: ModelConfig, source: ModelSource) -> dict[str, str]:
    """The argument of `preload`: that of `initialize` without what differs between instances.

    `config`: the configuration before the model has completed it.
    """
    return {
        "model_config": to_json(config),
        "model_repository": source.directory,
        "model_version": str(source.version),
        "model_name": config.name,
    }


class InitializeArguments:
    """The arguments of the model's `initialize`, for a configuration of the model.

    Source: docs/reference/model-methods.md, "initialize".
    """

    def __init__(self, config: ModelConfig, source: ModelSource) -> None:
        self.config = config
        self._common = preload_arguments(config, source)

    def for_instance(self, spec: InstanceSpec) -> dict[str, str]:
        """The arguments of one instance."""
        return {
            **self._common,
            "model_instance_kind": spec.kind,
            "model_instance_name": spec.name,
            "model_instance_device_id": str(spec.device_id),
        }
