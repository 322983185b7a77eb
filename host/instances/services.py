"""What instances need of the host around them."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from host.inference.request import Call, InferRequest, RequestTrace
from host.instances.arenas import Arenas
from host.instances.busy_polling import BusyPoller
from host.instances.channel import Channel
from host.instances.process import Launcher
from host.instances.process_reaper import ProcessReaper
from host.logs.formats import Label
from stub.wire.messages import LogLine
from stub.wire.payload import TraceLink


class Models(Protocol):
    """What models ask other models through (BLS)."""

    def check_bls_target(self, request: InferRequest) -> Awaitable[None] | None:
        """What must be awaited before that model is asked, if it has a say on being ready.

        Raises HostError, at once or when awaited, if it cannot be asked.
        """

    def infer_for_bls(self, request: InferRequest, decoupled: bool) -> Call:
        """Start a BLS request of a model. Raises HostError if it cannot be started.

        `decoupled`: any number of responses can be taken.
        """

    def create_child_trace(self, link: TraceLink | None) -> RequestTrace | None:
        """The trace of a request on behalf of another one; None if that has none any more."""

    def break_deadlock(self, call: Call) -> None:
        """Fail a BLS call that could only go on after itself, now or when it turns out so."""


class ModelControl(Protocol):
    """Loads and unloads models for models (pb_utils spec 3.14). Every method raises HostError."""

    async def load(self, name: str, config: str, files: dict[str, bytes], requester: str) -> None:
        """Load or reload a model, with overrides if they are not empty; wait until it is done.

        `asker` is the model whose own load waits for this, in `initialize`; "" if none does.
        """

    async def unload(self, name: str, dependents: bool) -> None:
        """Begin to unload a model."""

    async def is_ready(self, name: str, version: str) -> bool:
        """Whether a model is ready; `version` is "" for any."""


class Metrics(Protocol):
    """Metrics of models (pb_utils spec 3.13).

    `owner` stands for one stub; it chooses the numbers of its families and metrics.
    """

    def new_family(
        self, owner: object, family: int, name: str, description: str, kind: int
    ) -> None:
        """Register a family; kinds are 0 counter, 1 gauge, 2 histogram. Raises HostError."""

    def new_metric(
        self,
        owner: object,
        metric: int,
        family: int,
        labels: dict[str, str],
        buckets: list[float] | None,
    ) -> None:
        """Create a metric in a family of the same owner. Raises HostError."""

    def update_metric(self, owner: object, metric: int, change: str, value: float) -> None:
        """`increment`, `set` or `observe`; one that has gone is left alone."""

    def read_metric(self, owner: object, metric: int) -> float:
        """The value. Raises HostError."""

    def release_objects(self, owner: object, families: list[int], metrics: list[int]) -> None:
        """The owner has let go of these."""

    def remove_owner(self, owner: object) -> None:
        """The owner is gone, and with it everything it held."""


class HostServices(Protocol):
    """What an instance needs of the host around it."""

    channel: Channel
    busy_poller: BusyPoller
    arenas: Arenas
    launcher: Launcher
    terminal: Launcher
    process_reaper: ProcessReaper
    models: Models
    control: ModelControl
    metrics: Metrics
    load_seconds: float | None  # that an import, an `initialize` or a sample of a warm-up may take

    def log_model_line(self, label: Label, line: LogLine, calls: Sequence[Call] = ()) -> None:
        """Log what a model logged, maybe about these calls."""

    def log_stub_output(self, label: Label, line: str, error: bool) -> None:
        """Log what a stub printed."""

    def instance_exited(self, instance: object) -> None:
        """Called when the process of an instance has ended."""
