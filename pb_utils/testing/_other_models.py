"""The stand-ins for models that the model under test calls, loads and unloads."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from pb_utils import _model_texts as texts
from pb_utils._exceptions import TritonModelException
from pb_utils._response import InferenceResponse
from pb_utils.testing._instance import Instance
from pb_utils.testing._messages import (
    PendingRequest,
    as_tensors,
    discard_response,
    error_response,
    request_as_received,
    response_as_received,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from pb_utils._request import InferenceRequest
    from pb_utils._request_fields import RequestFields
    from pb_utils._runtime import ResponseReceiver
    from pb_utils._tensor import Tensor

    Function = Callable[[InferenceRequest], Union[InferenceResponse, Iterator[InferenceResponse]]]
    StandIn = Union[Function, Mapping[str, Union[npt.ArrayLike, Tensor]], Instance]


class ModelControl(NamedTuple):
    """A call by which the model under test has loaded or unloaded a model.

    Attributes:
        action: ``load`` or ``unload``.
        name: name of the model.
        config: the configuration as JSON text; ``""`` for the stored one.
        files: contents of files, by their paths below the model's folder.
    """

    action: str
    name: str
    config: str
    files: dict[str, bytes]


class OtherModels:
    """Replaces a model repository. All models are loaded at first. Error texts are a server's."""

    def __init__(
        self,
        models: Mapping[str, Any],
        to_stand_in: Callable[[Any], StandIn],
        control: list[ModelControl],
    ) -> None:
        """Creates the repository.

        Args:
            models: what the test has passed, by model name. A model is looked up when a request for
                it arrives, so that a mapping may load it then.
            to_stand_in: returns the stand-in for one of them.
            control: the list to which calls of model control are appended.
        """
        self._models = models
        self._to_stand_in = to_stand_in
        self._control = control
        self._unloaded: set[str] = set()
        self._added: set[str] = set()
        self._holds: Counter[str] = Counter()

    def load_model(self, name: str, config: str, files: Mapping[str, bytes], hold: bool) -> None:
        """Loads a model. A model without a stand-in needs a configuration and files.

        Raises:
            TritonModelException: a server would reject the call.
        """
        known = name in self._models or name in self._added
        if not _is_config(config) or (files and not config) or not (known or files):
            raise TritonModelException(texts.failed_load(name))
        self._control.append(ModelControl("load", name, config, dict(files)))
        self._holds[name] += hold
        if name not in self._models:
            self._added.add(name)
        self._unloaded.discard(name)

    def unload_model(self, name: str) -> None:
        """Releases a hold, and unloads a model that has none. An unknown one is not an error."""
        self._control.append(ModelControl("unload", name, "", {}))
        self._holds[name] = max(0, self._holds[name] - 1)
        if not self._holds[name] and (name in self._models or name in self._added):
            self._unloaded.add(name)

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Returns whether a model is ready.

        Raises:
            TritonModelException: the model is unknown or unloaded.
        """
        if name not in self._models and name not in self._added:
            raise TritonModelException(texts.unknown_model(name, "is not found"))
        if name in self._unloaded:
            raise TritonModelException(texts.unknown_model(name, "has no available versions"))
        _check_version(version)
        model = self._find(name) if name in self._models else None
        return model.accepts_requests() if isinstance(model, Instance) else True

    def _find(self, name: str) -> StandIn:
        return self._to_stand_in(self._models[name])

    def infer(
        self,
        request: RequestFields,
        decoupled: bool,
        receive: ResponseReceiver,
        cancelled: threading.Event,
    ) -> None:
        """Runs a request on a stand-in, which sends its responses to ``receive``, perhaps later.

        Raises:
            Exception: any exception of a function of the test, except TritonModelException.
        """
        problem = self._infer_error(request._model_name, decoupled)
        if problem:
            receive(error_response(texts.failed_bls(request._model_name, problem)), True)
            return
        model = self._find(request._model_name)
        pending_request = PendingRequest(
            decoupled, discard_response, cancelled, request._requested_output_names
        )
        received = request_as_received(request, pending_request, ())
        pending_request.close()  # the stand-in needs it only for is_cancelled()
        if isinstance(model, Instance):
            try:
                model.run_batch([received], [receive])
            except Exception:  # run_batch has sent the error to the caller
                return
        elif isinstance(model, Mapping):
            response = InferenceResponse(as_tensors(model))
            receive(response_as_received(response, request._requested_output_names), True)
        else:
            _call_function(model, received, decoupled, receive)

    def _infer_error(self, name: str, decoupled: bool) -> str:
        try:
            ready = self.is_model_ready(name)
        except TritonModelException as error:
            return str(error)
        if not ready:
            return texts.not_ready_for_bls(name)
        if name not in self._models:
            return f"pbhost.testing has no stand-in for model '{name}'; pass one in models="
        model = self._find(name)
        if isinstance(model, Instance) and model.decoupled and not decoupled:
            return texts.decoupled_needed_for_bls(name)
        return ""


def _call_function(
    function: Function, request: InferenceRequest, decoupled: bool, receive: ResponseReceiver
) -> None:
    """Runs a request on a function, which returns a response or, as a generator, yields several."""
    requested_outputs = request.requested_output_names()
    try:
        returned = function(request)
        if isinstance(returned, InferenceResponse):
            receive(response_as_received(returned, requested_outputs), True)
            return
        if not decoupled:
            name = request._model_name
            problem = texts.decoupled_needed_for_bls(name)
            receive(error_response(texts.failed_bls(name, problem)), True)
            return
        for response in returned:
            receive(response_as_received(response, requested_outputs), False)
            if request.is_cancelled():
                break
    except TritonModelException as error:
        receive(error_response(str(error)), True)
        return
    receive(None, True)


def _is_config(text: str) -> bool:
    if not text:
        return True
    try:
        parsed: Any = json.loads(text)
    except ValueError:
        return False
    return isinstance(parsed, dict)


def _check_version(version: str) -> None:
    if not version:
        return
    try:
        number = int(version)
    except ValueError:
        raise TritonModelException(texts.invalid_version(version, " (details: stol)")) from None
    if number <= 0:
        raise TritonModelException(texts.invalid_version(version))
