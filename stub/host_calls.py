"""Calls from a model to the host: model control and metrics."""

import itertools
import threading
from typing import Callable, Dict, Mapping, Optional, Sequence, Union

import pb_utils
from pb_utils._model_texts import LABEL_NO_TEXT, failed_call
from stub.wire import messages as m

HOST_GONE = "the host has ended"
"""The error of calls that wait for a host that has ended."""

INSTANCE_ENDED = "the model instance has ended"
"""The error of calls that wait when their instance has been unloaded."""

Value = Union[None, bool, int, float]


class _PendingCall:
    __slots__ = ("done", "reply")

    def __init__(self) -> None:
        self.done = threading.Lock()
        self.done.acquire()
        self.reply: Optional[m.HostReply] = None


class HostCalls:
    """Sends numbered calls to the host and waits for their replies; any thread may call.

    `send_after_deferred` sends the messages that finalisers have queued first, because a metric
    family that was dropped may be created again.
    """

    def __init__(
        self,
        send: Callable[[Sequence[m.ToHost]], None],
        send_after_deferred: Callable[[Sequence[m.ToHost]], None],
    ) -> None:
        self._send = send
        self._send_after_deferred = send_after_deferred
        self._numbers = itertools.count(1)
        self._metric_numbers = itertools.count(1)  # numbers of metrics and families
        self._pending: Dict[int, _PendingCall] = {}
        self._ended = ""  # why no reply arrives any more
        self._name = ""
        self._calls_allowed = False
        self.control_allowed = True

    def set_instance_name(self, name: str) -> None:
        """Sets the instance's name when its initialization begins, and allows calls from now on."""
        self._name = name
        self._calls_allowed = True

    def receive_reply(self, reply: m.HostReply) -> None:
        """Passes a reply to the thread that made the call."""
        call = self._pending.pop(reply.number)
        call.reply = reply
        call.done.release()

    def fail_pending_calls(self, reason: str) -> None:
        """Ends the calls that wait for a reply, and later ones, with an error."""
        self._ended = reason
        for number in list(self._pending):
            self._fail_call(number)

    def _fail_call(self, number: int) -> None:
        if call := self._pending.pop(number, None):
            call.reply = m.HostReply(number, self._ended)
            call.done.release()

    def error_message(self, text: str) -> str:
        """Returns the text of an error of the host (docs/reference/model-module.md, "Metrics")."""
        return failed_call(self._name, text)

    def _call(self, message: Callable[[int], m.ToHost]) -> Value:
        """Sends a call and waits for the reply. Raises TritonModelException if the host refuses."""
        self._check_allowed()
        number = next(self._numbers)
        call = self._pending[number] = _PendingCall()
        self._send_after_deferred([message(number)])
        if self._ended:  # checked after the call is registered, or it could be missed
            self._fail_call(number)
        call.done.acquire()
        reply = call.reply
        assert reply is not None
        if reply.error is not None:
            raise pb_utils.TritonModelException(self.error_message(reply.error))
        return reply.value

    def _check_allowed(self) -> None:
        if not self._calls_allowed:
            raise pb_utils.TritonModelException(
                self.error_message(
                    "metrics and model control are not available before 'initialize'"
                )
            )

    # Model control

    def load_model(self, name: str, config: str, files: Mapping[str, bytes], hold: bool) -> None:
        """Loads a model. Raises TritonModelException."""
        self._check_control("load_model")
        self._call(lambda number: m.LoadModel(number, name, config, dict(files), hold))

    def unload_model(self, name: str, dependents: bool) -> None:
        """Starts to unload a model. Raises TritonModelException."""
        self._check_control("unload_model")
        self._call(lambda number: m.UnloadModel(number, name, dependents))

    def is_model_ready(self, name: str, version: str) -> bool:
        """Returns whether a model is ready. Raises TritonModelException."""
        self._check_control("is_model_ready")
        return bool(self._call(lambda number: m.IsModelReady(number, name, version)))

    def _check_control(self, function: str) -> None:
        if not self.control_allowed:
            raise pb_utils.TritonModelException(
                self.error_message(f"{function} is not supported in 'finalize'")
            )

    # Metrics

    def new_metric_family(self, name: str, description: str, kind: int) -> int:
        """Creates a metric family; returns its number. Raises TritonModelException."""
        family = next(self._metric_numbers)
        self._call(lambda number: m.NewMetricFamily(number, family, name, description, kind))
        return family

    def new_metric(
        self, family: int, labels: Mapping[str, object], buckets: Optional[Sequence[float]]
    ) -> int:
        """Creates a metric; returns its number. Raises TritonModelException."""
        texts: Dict[str, str] = {}
        for name, value in labels.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise pb_utils.TritonModelException(self.error_message(LABEL_NO_TEXT))
            texts[name] = value
        metric = next(self._metric_numbers)
        bounds = None if buckets is None else [float(bound) for bound in buckets]
        self._call(lambda number: m.NewMetric(number, metric, family, texts, bounds))
        return metric

    def change_metric(self, metric: int, change: str, value: float) -> None:
        """Changes a metric; does not wait for the host."""
        self._send([m.ChangeMetric(metric, change, value)])

    def read_metric(self, metric: int) -> float:
        """Returns the value of a metric. Raises TritonModelException."""
        value = self._call(lambda number: m.ReadMetric(number, metric))
        return float(value or 0.0)
