"""The services of the host that instances use."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Protocol

from host.crashes.records import CrashRecords
from host.inference.call import Call
from host.inference.request import InferRequest, RequestTrace
from host.instances.arenas import Arenas
from host.instances.busy_polling import BusyPoller
from host.instances.host_channel import Channel
from host.instances.reaper_client import ProcessReaper
from host.instances.stub_process import Launcher
from host.logs.formats import Label
from host.metrics.custom import CustomMetrics
from host.repository.fingerprint import ImportedFiles
from host.system.resources import MemoryGroup
from stub.wire.messages import LogLine, TraceLink


class Models(Protocol):
    """Sends requests of models to other models (BLS)."""

    def infer_for_bls(
        self, request: InferRequest, decoupled: bool
    ) -> Call | Coroutine[None, None, Call]:
        """Starts a BLS request; if the target model defines `is_ready`, returns a coroutine for it.

        `decoupled`: any number of responses is accepted. Raises HostError, at once or when awaited,
        if the model cannot be called.
        """

    def create_child_trace(self, link: TraceLink | None) -> RequestTrace | None:
        """The trace of a request made for another one; None if that is no longer traced."""

    def break_deadlock(self, call: Call) -> None:
        """Fails a BLS call that waits for itself, now or when a cycle forms."""


class ModelControl(Protocol):
    """Model control for models. Every method raises HostError.

    Source: docs/reference/model-module.md, "Model control".
    """

    async def load_for_model(
        self, name: str, config: str, files: dict[str, bytes], requester: str, holder: object
    ) -> None:
        """Loads or reloads a model, with overrides if they are not empty; returns when it is
        loaded.

        `requester`: the model whose `initialize` waits for this load, "" if there is none.
        `holder`: the stub that holds the model from now on, None if it does not.
        """

    async def unload_for_model(self, name: str, dependents: bool, holder: object) -> None:
        """Releases a hold of `holder`, and starts to unload the model unless it is still held."""

    def release_holds(self, holder: object) -> None:
        """Releases the holds of a stub that has ended."""

    async def is_ready(self, name: str, version: str) -> bool:
        """Whether a model is ready; `version` "" is any."""


class HostServices(Protocol):
    """The services that one instance uses."""

    channel: Channel
    busy_poller: BusyPoller
    arenas: Arenas
    launcher: Launcher
    terminal: Launcher
    process_reaper: ProcessReaper
    memory_group: MemoryGroup
    crash_records: CrashRecords
    models: Models
    control: ModelControl
    metrics: CustomMetrics
    log_levels: int  # the levels of `pb_utils.Logger` that are written; level n is bit n
    imported_files: ImportedFiles | None  # if stubs report what they import
    load_seconds: float | None  # limit on an import, an `initialize` or a warm-up sample

    def log_model_line(self, label: Label, line: LogLine, calls: Sequence[Call] = ()) -> None:
        """Logs what a model logged, about these calls if there are any."""

    def log_stub_output(self, label: Label, line: str, error: bool) -> None:
        """Logs what a stub printed."""

    def instance_exited(self, instance: object) -> None:
        """Called when the process of an instance has ended."""
