"""All stubs of one server, and what they share: sockets, arenas and launchers."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Sequence

from host.crashes.records import CrashRecords
from host.environments.environment import Environment
from host.errors import HostError, internal, unavailable
from host.inference.call import Call
from host.instances.activity import InstanceActivity
from host.instances.arenas import Arenas
from host.instances.busy_polling import BusyPoller
from host.instances.host_channel import Channel
from host.instances.instance import Instance
from host.instances.launchers import ForkLauncher, Preload, TerminalLauncher
from host.instances.reaper_client import ProcessReaper
from host.instances.regions import Regions
from host.instances.services import ModelControl, Models
from host.instances.stub_process import NO_MORE_PROCESSES, Launcher, stub_lost
from host.logs.formats import Label
from host.logs.log_handler import is_level_written
from host.metrics.custom import CustomMetrics
from host.repository.fingerprint import ImportedFiles
from host.system.resources import MemoryGroup
from stub.wire.heap import HeapTrimmer
from stub.wire.messages import LogLine

_log = logging.getLogger("pbhost")

_TRIM_SECONDS = 2.0
_KILL_TIMEOUT = 30.0  # a process in a system call of a driver or of a network file system is slow

_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
"""`pb_utils.Logger` levels, in their order.

Source: docs/reference/model-module.md, "Logger".
"""


class StubPool:
    """Starts instances, and provides the services that they need.

    `arena_limit`: bytes that the tensors of one process may take. `client_memory`: whether clients
    may register shared memory. `control` must be set before the first instance starts.
    `load_seconds`: limit on each step of a load: the import, `initialize`, each warm-up sample.
    `imported_files`: gets the files that models import. `crash_records`: where deaths of stubs are
    recorded. Raises OSError.
    """

    control: ModelControl
    load_seconds: float | None = None
    imported_files: ImportedFiles | None = None

    def __init__(
        self,
        launcher: Launcher,
        arena_limit: int,
        models: Models,
        metrics: CustomMetrics,
        allow_client_memory: bool,
        crash_records: CrashRecords,
    ) -> None:
        self.arenas = Arenas(arena_limit)  # first, as it may fail and the channel has a directory
        self.channel = Channel()
        self.busy_poller = BusyPoller()
        self.regions = Regions(self.arenas if allow_client_memory else None)
        self.launcher = launcher
        self.terminal: Launcher = TerminalLauncher()
        self.process_reaper = ProcessReaper()
        self.memory_group = MemoryGroup()
        self.crash_records = crash_records
        self.models = models
        self.metrics = metrics
        self._instances: set[Instance] = set()
        self._prepared: set[PreparedModel] = set()
        self._closing = False
        self._empty = asyncio.Event()
        self._empty.set()
        self.log_levels = 0
        self._heap = HeapTrimmer()
        self._trim()

    def _trim(self) -> None:
        """Frees tensor memory that was not needed recently, and looks at what changes rarely."""
        self.arenas.host.trim()
        self.regions.close_unregistered()
        self.update_log_levels()
        self._heap.trim()
        self._timer = asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._trim)

    async def start_instance(
        self,
        label: Label,
        environment: Environment | None = None,
        attached: bool = False,
        launcher: Launcher | None = None,
        warnings: set[str] | None = None,
    ) -> Instance:
        """Starts a stub, in an environment or on the host's Python. Raises HostError or StubLost.

        `attached`: it has the host's standard streams, so that it can be debugged. `launcher`: that
        of a model that is prepared. `warnings`: those about the model that were logged, which its
        instances share.
        """
        if self._closing:
            raise unavailable("the server is stopping")
        tries_left = 1
        while True:
            instance = None
            try:
                instance = Instance(label, self, environment, attached, launcher, warnings)
                self._instances.add(instance)
                self._empty.clear()
                await instance.start()
            except OSError as error:
                if instance is not None:
                    self.instance_exited(instance)
                if not isinstance(error, TimeoutError) or not tries_left:
                    raise _start_error(label, error) from error
                # The fork server hangs; another one starts now.
                _log.warning("%s: the next stubs are forked from another one", error.strerror)
                tries_left -= 1
            except BaseException:  # also if cancelled, as the process has no other owner
                if instance is not None:
                    instance.kill()
                raise
            else:
                return instance

    async def prepare_model(
        self, label: Label, job: bytes, environment: Environment | None
    ) -> PreparedModel | None:
        """Starts a process that prepares a model, from which its stubs are forked.

        None if stubs are not forked. `job`: the JSON of a `PreloadJob`. Raises HostError.
        """
        if not isinstance(self.launcher, ForkLauncher):
            return None
        prepared = PreparedModel(self, label, job, environment)
        self._prepared.add(prepared)
        try:
            await prepared.launcher.prepare()
        except BaseException as error:  # also if cancelled, as the process has no other owner
            await prepared.close()
            if isinstance(error, OSError):
                raise _start_error(label, error) from error
            raise
        return prepared

    def prepared_closed(self, prepared: PreparedModel) -> None:
        """Called when the process of a prepared model has ended."""
        self._prepared.discard(prepared)

    def update_log_levels(self) -> None:
        """Tells the stubs which log lines are written, so that they send no others."""
        written = sum(1 << n for n, level in enumerate(_LEVELS) if is_level_written(level))
        if written != self.log_levels:
            self.log_levels = written
            for instance in self._instances:
                instance.set_log_levels(written)

    def drain(self) -> None:
        """Handles what all stubs have sent so far."""
        for instance in list(self._instances):
            instance.read_announced()

    async def describe_activity(self, model: str) -> list[InstanceActivity]:
        """What the instances of a model do now, or all instances; in the order of their names."""
        wanted = [one for one in self._instances if model in ("", one.label.model)]
        found = await asyncio.gather(*(one.describe_activity() for one in wanted))
        return sorted(found, key=lambda one: (one.model, one.version, one.instance, one.pid))

    def process_ids(self) -> dict[str, list[int]]:
        """The process ids of stubs and of prepared models, by the name of the model."""
        found: dict[str, list[int]] = {}
        for instance in self._instances:
            if instance.pid:
                found.setdefault(instance.label.model, []).append(instance.pid)
        for prepared in self._prepared:
            if prepared.pid:
                found.setdefault(prepared.label.model, []).append(prepared.pid)
        return found

    def awaited_models(self) -> dict[str, set[str]]:
        """The models that BLS requests wait for until they are loaded, by the calling model."""
        found: dict[str, set[str]] = {}
        for instance in self._instances:
            if names := instance.session.bls_requests.find_awaited_models():
                found.setdefault(instance.label.model, set()).update(names)
        return found

    def instance_exited(self, instance: object) -> None:
        """Called when the process of an instance has ended."""
        self._instances = {known for known in self._instances if known is not instance}
        if not self._instances:
            self._empty.set()

    def log_model_line(self, label: Label, line: LogLine, calls: Sequence[Call] = ()) -> None:
        """Logs what a model logged."""
        level = _LEVELS[line.level] if 0 <= line.level < 4 else logging.INFO
        if not _log.isEnabledFor(level):
            return
        traces = (call.request.trace for call in calls)
        extra = {
            "instance": label,
            "source": f"{line.file}:{line.line}",
            "requests": [call.request.id for call in calls if call.request.id],
            "trace_id": next((trace.trace_id for trace in traces if trace is not None), ""),
        }
        _log.log(level, "%s", line.text, extra=extra)

    def log_stub_output(self, label: Label, line: str, error: bool) -> None:
        """Logs what a stub printed."""
        _log.log(
            logging.WARNING if error else logging.INFO,
            line,
            extra={"instance": label, "printed": True},
        )

    async def close(self) -> None:
        """Kills the stubs that are left, waits at most 30 s for their ends, and frees the rest."""
        self._closing = True
        for instance in list(self._instances):
            instance.kill()
        try:
            await asyncio.wait_for(self._empty.wait(), _KILL_TIMEOUT)
        except asyncio.TimeoutError:
            left = ", ".join(str(instance.pid) for instance in self._instances)
            _log.error("processes %s did not end within %g s of SIGKILL", left, _KILL_TIMEOUT)
        self._timer.cancel()
        for prepared in list(self._prepared):
            await prepared.close()
        await self.launcher.close()
        await self.process_reaper.close()
        await self.crash_records.close()
        self.channel.close()
        self.regions.close()
        self.arenas.close()


class PreparedModel:
    """A process that has prepared a model, and forks into its stubs.

    If it ends, the next stub that starts has it started again.
    """

    def __init__(
        self, pool: StubPool, label: Label, job: bytes, environment: Environment | None
    ) -> None:
        self.label = label
        self.pid = 0
        self._groups: list[int] = []  # of all its processes, as it may have been started again
        self._pool = pool
        preload = Preload(
            label.model,
            job,
            lambda line, error: pool.log_stub_output(label, line, error),
            self._started,
            pool.load_seconds,
            environment,
        )
        self.launcher = ForkLauncher(preload=preload)

    def _started(self, pid: int) -> None:
        self.pid = pid
        self._groups.append(pid)
        self._pool.process_reaper.watch_group(pid)

    async def close(self) -> None:
        """Ends the process. Its stubs have ended before."""
        await self.launcher.close()
        while self._groups:  # what `preload` has started ends as well
            self._pool.process_reaper.kill_group(self._groups.pop())
        self.pid = 0
        self._pool.prepared_closed(self)


def _start_error(label: Label, error: OSError) -> HostError:
    what = f"cannot start a stub process for '{label}': {error.strerror or error}"
    if error.filename:  # the interpreter of an environment
        return internal(f"{what}: {error.filename}")
    if error.errno == errno.ENOMEM:
        return stub_lost(
            f"{what}; set --arena-byte-size to less, or allow the host more memory (ulimit -v)"
        )
    if error.errno == errno.EAGAIN:
        return stub_lost(f"{what}: {NO_MORE_PROCESSES}")
    return stub_lost(
        f"{what}; the host may need a higher limit of open files (ulimit -n) or more memory"
    )
