"""Calls of a model to the host: model control and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from host.errors import HostError, unexpected_failure
from host.instances.services import HostServices
from stub.wire import messages as m

_log = logging.getLogger("pbhost")

Value = None | bool | int | float


class HostCalls:
    """The calls of one stub; `send_reply` sends a reply."""

    def __init__(self, services: HostServices, send_reply: Callable[[m.HostReply], None]) -> None:
        self.initializing = ""  # the model whose `initialize` runs now
        self._services = services
        self._metrics = services.metrics
        self._send_reply = send_reply
        self._tasks: set[asyncio.Task[None]] = set()
        self._stub_exited = False
        self._may_hold = False  # whether the stub has asked to hold a model

    def load_model(self, message: m.LoadModel) -> None:
        """Loads a model; replies when it is loaded."""
        self._may_hold = self._may_hold or message.hold
        load = self._services.control.load_for_model(
            message.name,
            message.config,
            message.files,
            self.initializing,
            self if message.hold else None,
        )
        self._reply_when_done(message.number, load)

    def unload_model(self, message: m.UnloadModel) -> None:
        """Starts to unload a model; replies when that has started."""
        control = self._services.control
        self._reply_when_done(
            message.number, control.unload_for_model(message.name, message.dependents, self)
        )

    def is_model_ready(self, message: m.IsModelReady) -> None:
        """Replies whether a model is ready."""
        self._reply_when_done(
            message.number, self._services.control.is_ready(message.name, message.version)
        )

    def _reply_when_done(self, number: int, answer: Awaitable[Value]) -> None:
        async def reply() -> None:
            try:
                value = await answer
            except HostError as error:
                self._send_reply(m.HostReply(number, error.message))
            except asyncio.CancelledError:
                if not self._stub_exited:  # a hook waited for a task that was cancelled
                    self._send_reply(m.HostReply(number, "the call was cancelled"))
                raise
            except Exception as error:  # of a hook, or a defect: the model must not wait forever
                _log.exception("unexpected failure of a call of a model to the server")
                self._send_reply(m.HostReply(number, unexpected_failure(error).message))
            else:
                self._send_reply(m.HostReply(number, None, value))

        task = asyncio.get_running_loop().create_task(reply())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def new_metric_family(self, message: m.NewMetricFamily) -> None:
        """Registers a metric family."""
        self._reply_now(
            message.number,
            lambda: self._metrics.new_family(
                self, message.family, message.name, message.description, message.kind
            ),
        )

    def new_metric(self, message: m.NewMetric) -> None:
        """Creates a metric."""
        self._reply_now(
            message.number,
            lambda: self._metrics.new_metric(
                self, message.metric, message.family, message.labels, message.buckets
            ),
        )

    def change_metric(self, message: m.ChangeMetric) -> None:
        """Changes a metric."""
        self._metrics.update_metric(self, message.metric, message.operation, message.value)

    def read_metric(self, message: m.ReadMetric) -> None:
        """Replies with the value of a metric."""
        self._reply_now(message.number, lambda: self._metrics.read_metric(self, message.metric))

    def drop_metrics(self, message: m.DropMetrics) -> None:
        """Releases metrics."""
        self._metrics.release_objects(self, message.families, message.metrics)

    def _reply_now(self, number: int, answer: Callable[[], Value]) -> None:
        try:
            value = answer()
        except HostError as error:
            self._send_reply(m.HostReply(number, error.message))
        else:
            self._send_reply(m.HostReply(number, None, value))

    def stub_exited(self) -> None:
        """Called when the stub is gone; loads and unloads continue."""
        self._stub_exited = True
        for task in self._tasks:
            task.cancel()
        self._metrics.remove_owner(self)
        if self._may_hold:
            self._services.control.release_holds(self)
