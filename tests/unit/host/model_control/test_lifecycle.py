"""Loads and unloads of models of a repository on disk, one after the other and concurrently."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from host.config.model_config import ConfigSettings, LoadedConfig
from host.config.schema import ModelConfig
from host.errors import ErrorCode, HostError, internal
from host.inference.call import Call
from host.inference.request import InferRequest
from host.metrics.latency import MetricsSettings
from host.metrics.model_metrics import ModelMetrics
from host.metrics.statistics import InferenceCounters
from host.model_control.lifecycle import LoadLimiter, ModelLifecycle
from host.model_control.load_planner import LoadRequest
from host.models.draining import DrainableModel
from host.models.loaders import Loaders, LoadSettings, RepositoryReadError, VersionLoadError
from host.models.registry import Extensions, LoadedModel, Registry, VersionState
from host.repository.override import Override, UploadedDirectories
from host.repository.repository import Repository
from tests.conftest import DEADLINE, RepositoryBuilder
from tests.waiting import eventually


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, DEADLINE))


async def turns() -> None:
    """Lets everything that can continue do so."""
    for _ in range(20):
        await asyncio.sleep(0)


class Load:
    """A load that holds a slot until told to end."""

    def __init__(self, slots: LoadLimiter) -> None:
        self._running = False
        self.end = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run(slots))

    def is_running(self) -> bool:
        return self._running

    async def _run(self, slots: LoadLimiter) -> None:
        async with slots:
            self._running = True
            await self.end.wait()
        self._running = False


def test_no_more_than_the_given_number_run_and_all_get_their_turn() -> None:
    async def work() -> None:
        slots = LoadLimiter(2)
        loads = [Load(slots) for _ in range(5)]
        while any(not load.task.done() for load in loads):
            await turns()
            running = [load for load in loads if load.is_running()]
            assert 1 <= len(running) <= 2
            running[0].end.set()
            await turns()

    run(work())


def test_a_cancelled_load_does_not_take_a_turn_with_it() -> None:
    async def work() -> None:
        slots = LoadLimiter(1)
        first, second, third = (Load(slots) for _ in range(3))
        await turns()
        first.end.set()
        await asyncio.sleep(0)  # the second one has been woken, and is cancelled before it runs
        second.task.cancel()
        await turns()
        assert third.is_running()
        third.end.set()
        await third.task

    run(work())


def test_a_load_that_waits_for_another_one_does_not_count() -> None:
    async def work() -> None:
        slots = LoadLimiter(1)
        outer = Load(slots)
        await turns()
        with slots.lend_slot("outer", "inner"):
            inner, late = Load(slots), Load(slots)
            await turns()
            assert inner.is_running() and not late.is_running()
            inner.end.set()
            await inner.task
        outer.end.set()
        await turns()
        assert late.is_running()
        late.end.set()
        await late.task

    run(work())


def test_slots_are_not_overbooked_for_long_after_an_answer() -> None:
    async def work() -> None:
        slots = LoadLimiter(1)
        outer = Load(slots)
        await turns()
        with slots.lend_slot("outer", "inner"):
            inner = Load(slots)
            await turns()
        late = Load(slots)
        inner.end.set()
        await turns()
        assert not late.is_running(), "the outer load has its slot back"
        outer.end.set()
        await turns()
        assert late.is_running()
        late.end.set()
        await late.task

    run(work())


@pytest.mark.parametrize(
    ("waits", "last", "chain"),
    [
        ([], ("a", "a"), "a -> a"),
        ([("a", "b")], ("b", "a"), "b -> a -> b"),
        ([("a", "b"), ("b", "c")], ("c", "a"), "c -> a -> b -> c"),
        ([("a", "b"), ("a", "c"), ("c", "d")], ("d", "a"), "d -> a -> c -> d"),
    ],
)
def test_a_wait_that_closes_a_cycle_is_refused(
    waits: list[tuple[str, str]], last: tuple[str, str], chain: str
) -> None:
    slots = LoadLimiter(1)
    with ExitStack() as stack:
        for wait in waits:
            stack.enter_context(slots.lend_slot(*wait))
        with pytest.raises(HostError, match=f": {chain}\\. Load one"):
            stack.enter_context(slots.lend_slot(*last))
    with slots.lend_slot(*last) if last[0] != last[1] else ExitStack():
        pass  # a load that has ended closes no cycle


def test_waits_that_meet_are_no_cycle() -> None:
    slots = LoadLimiter(1)
    with ExitStack() as stack:
        for wait in (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "b")):
            stack.enter_context(slots.lend_slot(*wait))


CONFIG = """
    backend: "python"
    output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
"""
ALL_VERSIONS = f"{CONFIG} version_policy {{ all {{ }} }}"
TWO_INSTANCES = f"{CONFIG} instance_group {{ count: 2 }}"


def override(**fields: object) -> Override:
    """A configuration that a client sends with a load."""
    output = {"name": "y", "data_type": "TYPE_INT32", "dims": [1]}
    return Override(json.dumps({"backend": "python", "output": [output], **fields}))


class ProcesslessModel(DrainableModel):
    """A version that answers nothing and needs no process."""

    ready = True
    defines_is_ready = False

    def __init__(self, directory: Path, version: int, config: ModelConfig, events: list[str]):
        super().__init__()
        self.directory = directory
        self.name = config.name
        self.version = version
        self.config = config
        self.labels: Mapping[str, Sequence[str]] = {}
        self.extensions: Extensions = {}
        counters = InferenceCounters(self.name, str(version))
        self.metrics = ModelMetrics(config, version, counters, lambda: 0, MetricsSettings())
        self._events = events

    def infer(self, request: InferRequest) -> Call:
        call = Call(request)
        self._track_call(call)
        return call

    def call_finished(self, call: Call) -> None:
        self._release_call(call)

    async def why_not_ready(self) -> str:
        return ""

    def abort(self, error: HostError) -> None:
        for call in list(self._calls):
            call.abort(error)

    async def stop(self, grace: float, finalize: float) -> None:
        self._events.append(f"stop {self.version}")


class ProcesslessUpdate:
    """Other instances for a version that stays loaded."""

    def __init__(self, model: ProcesslessModel, loaded: LoadedConfig, events: list[str]) -> None:
        self._model = model
        self._loaded = loaded
        self._events = events

    def commit(self) -> Collection[asyncio.Task[None]]:
        self._events.append(f"commit {self._model.version}")
        self._model.config = self._loaded.config
        return ()

    async def wait_ended(self) -> None:
        self._events.append(f"ended {self._model.version}")

    async def discard(self) -> None:
        self._events.append(f"discard {self._model.version}")


class ProcesslessLoader:
    """Brings up versions without a process. `failures` are raised by the loads of a version."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.failures: dict[int, list[Exception]] = {}
        self.gates: dict[int, asyncio.Event] = {}
        self.configs: list[ModelConfig] = []

    async def load_version(
        self, directory: Path, version: int, loaded: LoadedConfig
    ) -> LoadedModel:
        self.events.append(f"load {version}")
        if version in self.gates:
            await self.gates[version].wait()
        if self.failures.get(version):
            raise self.failures[version].pop(0)
        self.configs.append(loaded.config)
        return ProcesslessModel(directory, version, loaded.config, self.events)

    async def update(
        self, model: LoadedModel, loaded: LoadedConfig, finalize: float
    ) -> ProcesslessUpdate:
        assert isinstance(model, ProcesslessModel)
        self.events.append(f"update {model.version}")
        if self.failures.get(model.version):
            raise self.failures[model.version].pop(0)
        return ProcesslessUpdate(model, loaded, self.events)


class Setup:
    """A lifecycle for one repository, which loads `m`."""

    def __init__(self, repository: RepositoryBuilder, retries: int, threads: int) -> None:
        self.files = repository
        self.loader = ProcesslessLoader()
        self.events = self.loader.events
        self.registry = Registry()
        self.uploads = UploadedDirectories()
        self.lifecycle = ModelLifecycle(
            self.registry,
            Repository([repository.path]),
            Loaders(self.loader, self.loader),
            LoadSettings(ConfigSettings(), threads=threads, retries=retries, grace=0, finalize=1),
            self.uploads,
        )

    def add(self, config: str = CONFIG, *versions: int) -> None:
        """Writes the configuration, and the versions that are not there yet."""
        for version in versions or (1,):
            there = (self.files.path / "m" / str(version) / "model.py").exists()
            self.files.add("m", None if there else "x = 1", config, version)

    async def load(self, override: Override | None = None, *, force: bool = False) -> bool:
        return await asyncio.shield(self.lifecycle.start_load(self._load(override, force)))

    async def _load(self, override: Override | None, force: bool) -> bool:
        lifecycle = self.lifecycle
        planned = await lifecycle.planner.read("m", LoadRequest(override), with_config=force)
        async with lifecycle.lock_model(planned) as planned:
            return await lifecycle.load_versions(planned, force=force)

    def gate(self, version: int = 1) -> asyncio.Event:
        """Holds the loads of a version until the event is set."""
        self.loader.gates[version] = asyncio.Event()
        return self.loader.gates[version]

    def states(self) -> dict[int, tuple[VersionState, str]]:
        return {n: (v.state, v.reason) for n, v in self.registry.versions("m").items()}

    def serving(self) -> list[int]:
        return [n for n, (state, _) in self.states().items() if state is VersionState.READY]

    async def happens(self, event: str, count: int = 1) -> None:
        await eventually(lambda: self.events.count(event) >= count, event, state=self.states)


@pytest.fixture
def with_lifecycle(
    repository: RepositoryBuilder,
) -> Callable[..., None]:
    """Runs a test with a lifecycle, and unloads everything after it."""

    def run(test: Callable[[Setup], Awaitable[None]], retries: int = 0, threads: int = 4) -> None:
        async def main() -> None:
            setup = Setup(repository, retries, threads)
            await asyncio.wait_for(test(setup), DEADLINE)
            await asyncio.wait_for(setup.lifecycle.unload_all(), DEADLINE)
            assert not setup.serving()
            setup.uploads.close()

        asyncio.run(main())

    return run


Run = Callable[..., None]


async def refusal(load: Awaitable[object]) -> HostError:
    with pytest.raises(HostError) as caught:
        await load
    return caught.value


def test_load_serves_the_latest_version_and_a_second_load_changes_nothing(
    with_lifecycle: Run,
) -> None:
    async def test(setup: Setup) -> None:
        setup.add(CONFIG, 1, 2)
        assert await setup.load()
        assert setup.serving() == [2]
        assert not await setup.load()
        assert setup.events == ["load 2"]

    with_lifecycle(test)


def test_new_version_serves_before_its_predecessor_stops(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        await setup.load()
        setup.add(CONFIG, 2)
        gate = setup.gate(2)
        loading = asyncio.ensure_future(setup.load())
        await setup.happens("load 2")
        assert setup.serving() == [1]
        assert setup.states()[2][0] is VersionState.LOADING
        gate.set()
        assert await loading
        assert setup.serving() == [2] and setup.registry.find("m").version == 2
        await setup.happens("stop 1")
        assert setup.events == ["load 1", "load 2", "stop 1"]

    with_lifecycle(test)


def test_replaced_version_finishes_its_calls_before_it_stops(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        await setup.load()
        call = setup.registry.find("m").infer(InferRequest("m", []))
        assert await setup.load(force=True)
        assert setup.events == ["load 1", "load 1"]
        call.respond(None)
        await setup.happens("stop 1")

    with_lifecycle(test)


def test_versions_load_at_the_same_time_within_the_limit(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add(ALL_VERSIONS, 1, 2, 3)
        gates = [setup.gate(version) for version in (1, 2, 3)]
        loading = asyncio.ensure_future(setup.load())
        await setup.happens("load 2")
        assert sorted(setup.events) == ["load 1", "load 2"]
        for gate in gates:
            gate.set()
        assert await loading
        assert setup.serving() == [1, 2, 3]

    with_lifecycle(test, threads=2)


def test_failed_version_keeps_all_others_of_the_load_from_serving(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add(ALL_VERSIONS, 1, 2)
        setup.loader.failures[2] = [internal("no memory")]
        error = await refusal(setup.load())
        assert isinstance(error, VersionLoadError)
        assert error.message == "version 2 is at UNAVAILABLE state: Internal: no memory;"
        assert error.lines == ["failed to load 'm' version 2: Internal: no memory"]
        assert setup.states() == {
            1: (VersionState.UNAVAILABLE, "unloaded"),
            2: (VersionState.UNAVAILABLE, "Internal: no memory"),
        }
        assert setup.events[-1] == "stop 1"

    with_lifecycle(test)


def test_versions_that_serve_outlast_a_failed_load(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        await setup.load()
        model = setup.registry.find("m")
        setup.loader.failures[1] = [internal("broken")]
        await refusal(setup.load(force=True))
        assert setup.registry.find("m") is model
        assert setup.events == ["load 1", "load 1"]
        assert await setup.load(force=True)
        assert setup.registry.find("m") is not model

    with_lifecycle(test)


def test_unexpected_exception_of_a_load_becomes_an_error_with_its_text(
    with_lifecycle: Run,
) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        setup.loader.failures[1] = [ZeroDivisionError("a defect")]
        error = await refusal(setup.load())
        assert "Internal: ZeroDivisionError('a defect')" in error.message

    with_lifecycle(test)


def test_failed_version_is_tried_again_as_often_as_the_settings_say(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        setup.loader.failures[1] = [internal("once"), internal("twice")]
        assert await setup.load()
        assert setup.events == ["load 1"] * 3
        setup.loader.failures[1] = [internal(str(number)) for number in range(4)]
        error = await refusal(setup.load(force=True))
        assert error.message.endswith("Internal: 2;")

    with_lifecycle(test, retries=2)


def test_change_of_instances_updates_a_version_in_place(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        await setup.load()
        model = setup.registry.find("m")
        setup.add(TWO_INSTANCES)
        assert not await setup.load()
        assert setup.events == ["load 1", "update 1", "commit 1", "ended 1"]
        assert setup.registry.find("m") is model
        assert model.config.instance_group[0].count == 2

    with_lifecycle(test)


def test_any_other_change_loads_a_version_again(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        await setup.load()
        setup.add(f"{CONFIG} max_batch_size: 8")
        assert await setup.load()
        await setup.happens("stop 1")
        assert setup.events == ["load 1", "load 1", "stop 1"]

    with_lifecycle(test)


def test_update_in_place_is_discarded_if_another_version_fails(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add(ALL_VERSIONS, 1)
        await setup.load()
        setup.add(f"{ALL_VERSIONS} instance_group {{ count: 2 }}", 1, 2)
        setup.loader.failures[2] = [internal("broken")]
        await refusal(setup.load())
        assert setup.serving() == [1]
        assert "discard 1" in setup.events and "commit 1" not in setup.events

    with_lifecycle(test)


def test_failed_update_in_place_leaves_the_version_ready_with_the_reason(
    with_lifecycle: Run,
) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        await setup.load()
        setup.add(TWO_INSTANCES)
        setup.loader.failures[1] = [internal("no memory")] * 2
        error = await refusal(setup.load())
        assert error.message == "version 1 is at READY state: Internal: no memory;"
        assert setup.states() == {1: (VersionState.READY, "Internal: no memory")}

    with_lifecycle(test)


def test_unload_during_a_load_makes_the_load_outdated(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        gate = setup.gate()
        loading = asyncio.ensure_future(setup.load())
        await setup.happens("load 1")
        setup.lifecycle.unload("m")
        gate.set()
        error = await refusal(loading)
        assert error.code is ErrorCode.INVALID_ARG
        assert error.message.startswith("Newer operation has been applied to the model lifecycle")
        assert setup.states() == {1: (VersionState.UNAVAILABLE, "unloaded")}
        assert setup.events == ["load 1", "stop 1"]
        del setup.loader.gates[1]
        assert await setup.load()

    with_lifecycle(test)


def test_unload_during_a_reload_also_stops_the_version_that_serves(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        await setup.load()
        gate = setup.gate()
        loading = asyncio.ensure_future(setup.load(force=True))
        await setup.happens("load 1", 2)
        setup.lifecycle.unload("m")
        gate.set()
        await refusal(loading)
        await setup.happens("stop 1", 2)
        assert setup.serving() == []

    with_lifecycle(test)


def test_load_that_waits_for_another_one_is_also_outdated_by_an_unload(
    with_lifecycle: Run,
) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        gate = setup.gate()
        loads = [asyncio.ensure_future(setup.load(force=True)) for _ in range(2)]
        await setup.happens("load 1")
        setup.lifecycle.unload("m")
        gate.set()
        for loading in loads:
            assert (await refusal(loading)).message.startswith("Newer operation")
        assert setup.serving() == []

    with_lifecycle(test)


def test_load_goes_on_when_its_caller_is_cancelled(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        gate = setup.gate()
        loading = asyncio.ensure_future(setup.load())
        await setup.happens("load 1")
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        gate.set()
        await eventually(lambda: setup.serving() == [1], "the version")

    with_lifecycle(test)


def test_unloaded_version_drains_and_then_says_that_it_was_unloaded(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        await setup.load()
        call = setup.registry.find("m").infer(InferRequest("m", []))
        setup.lifecycle.unload("m")
        assert setup.states()[1][0] is VersionState.UNLOADING
        await asyncio.sleep(0)
        assert setup.events == ["load 1"]
        call.respond(None)
        await eventually(
            lambda: setup.states() == {1: (VersionState.UNAVAILABLE, "unloaded")}, "the end"
        )
        assert not setup.lifecycle.living_models()

    with_lifecycle(test)


def test_override_holds_for_a_load_without_one_until_the_files_change(
    with_lifecycle: Run,
) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        await setup.load(override(max_batch_size=4))
        assert not await setup.load()
        assert await setup.load(force=True)
        setup.add(f"{CONFIG} max_batch_size: 2")
        assert await setup.load()
        assert await setup.load(force=True)
        assert [config.max_batch_size for config in setup.loader.configs] == [4, 4, 2, 2]

    with_lifecycle(test)


def test_override_is_forgotten_by_an_unload(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        await setup.load(override(max_batch_size=4))
        setup.lifecycle.unload("m")
        assert await setup.load()
        assert [config.max_batch_size for config in setup.loader.configs] == [4, 0]

    with_lifecycle(test)


def test_unload_for_an_ensemble_keeps_the_override_of_the_last_load(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        given = override(max_batch_size=4)
        await setup.load(given)
        setup.lifecycle.unload("m", keep_override=True)
        assert setup.lifecycle.planner.lasting_override("m") == Override(given.config)
        setup.lifecycle.unload("m")
        assert setup.lifecycle.planner.lasting_override("m") is None

    with_lifecycle(test)


def test_failed_load_does_not_remember_its_override(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        await setup.load()
        setup.loader.failures[1] = [internal("broken")]
        await refusal(setup.load(override(max_batch_size=4)))
        assert setup.lifecycle.planner.lasting_override("m") is None
        await setup.load(force=True)
        assert [config.max_batch_size for config in setup.loader.configs] == [0, 0]

    with_lifecycle(test)


def test_uploaded_files_are_used_once_and_removed_with_their_version(
    with_lifecycle: Run,
) -> None:
    async def test(setup: Setup) -> None:
        setup.add(CONFIG, 1)
        config = override(max_batch_size=4).config
        await setup.load(Override(config, {"7/model.py": b"x = 1"}))
        assert setup.serving() == [7]
        assert setup.lifecycle.planner.lasting_override("m") == Override(
            config
        )  # without the files
        model = setup.registry.find("m")
        assert isinstance(model, ProcesslessModel)
        uploaded = model.directory
        assert uploaded != setup.files.path / "m" and (uploaded / "7" / "model.py").exists()
        del model
        assert await setup.load()
        assert setup.serving() == [1]
        await eventually(lambda: not uploaded.exists(), "the files to be removed")

    with_lifecycle(test)


def test_uploaded_files_of_a_failed_load_are_removed(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        directories: list[Path] = []

        class Failing(ProcesslessLoader):
            async def load_version(
                self, directory: Path, version: int, loaded: LoadedConfig
            ) -> LoadedModel:
                directories.append(directory)
                raise internal("broken")

        setup.lifecycle._loaders = Loaders(Failing(), Failing())
        files = {"1/model.py": b"x = 1"}
        await refusal(setup.load(Override(override().config, files)))
        assert len(directories) == 1 and not directories[0].exists()

    with_lifecycle(test)


def test_model_without_a_directory_or_with_a_wrong_configuration_is_not_attempted(
    with_lifecycle: Run,
) -> None:
    async def test(setup: Setup) -> None:
        assert isinstance(await refusal(setup.load()), RepositoryReadError)
        setup.add("max_batch_size: -1 backend: 'python'")
        assert isinstance(await refusal(setup.load()), RepositoryReadError)
        assert setup.events == [] and setup.states() == {}

    with_lifecycle(test)


def test_refusal_by_the_caller_leaves_everything_as_it_was(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        await setup.load()

        async def load() -> None:
            planned = await setup.lifecycle.planner.read("m", LoadRequest(), with_config=True)
            async with setup.lifecycle.lock_model(planned):
                raise internal("its step model is missing")

        assert (await refusal(load())).message == "its step model is missing"
        assert setup.serving() == [1] and setup.events == ["load 1"]

    with_lifecycle(test)


def test_exit_refuses_loads_and_cancels_those_in_progress(with_lifecycle: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.add()
        setup.gate()
        loading = asyncio.ensure_future(setup.load())
        await setup.happens("load 1")
        await setup.lifecycle.unload_all()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert (await refusal(setup.load())).message == "Server exiting"

    with_lifecycle(test)
