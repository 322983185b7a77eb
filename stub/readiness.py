"""Calls the model's `is_ready` while other requests run."""

import threading
from typing import Callable, Sequence

from pb_utils._model_texts import IS_READY_NO_BOOL
from stub.coroutines import CoroutineRunner, is_coroutine
from stub.user_model import UserModel, describe_exception
from stub.wire.messages import (
    ReadinessResult,
    ToHost,
)


class ReadinessChecker:
    """Runs each check on a new thread, because the service thread must not wait for user code."""

    def __init__(
        self,
        model: UserModel,
        name: str,
        coroutines: CoroutineRunner,
        send: Callable[[Sequence[ToHost]], None],
    ) -> None:
        self._model = model
        self._name = name
        self._coroutines = coroutines
        self._send = send

    @property
    def defines_is_ready(self) -> bool:
        """Whether the model defines `is_ready`."""
        return self._model.defines("is_ready")

    def start_check(self, number: int) -> None:
        """Starts a check; the host starts the next one after it has this one's result."""
        thread = threading.Thread(target=self._run_check, args=(number,), daemon=True)
        thread.name = "pbhost-is-ready"
        try:
            thread.start()
        except RuntimeError as error:  # no more threads are allowed
            self._send([ReadinessResult(number, False, describe_exception(error))])

    def _run_check(self, number: int) -> None:
        try:
            result = self._model.instance.is_ready()
            if is_coroutine(result):
                result = self._coroutines.submit(result, 0).result()
        except BaseException as error:  # the exception is the reason that the client sees
            self._send([ReadinessResult(number, False, describe_exception(error))])
            return
        if not isinstance(result, bool):
            self._send([ReadinessResult(number, False, IS_READY_NO_BOOL)])
            return
        reason = "" if result else f"Model '{self._name}' is not ready (user-defined check failed)."
        self._send([ReadinessResult(number, result, reason)])
