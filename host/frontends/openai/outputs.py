"""What the responses of a model add to choices: deltas, finish reasons and token counts."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np

from host.errors import HostError
from host.frontends.http import json_text as json
from host.frontends.http.tensors import split_strings
from host.frontends.openai.contract import Contract
from host.frontends.openai.errors import from_host_error, model_failure
from host.inference.request import InferResponse, Tensor, copy_from_shared_memory


def read_texts(tensor: Tensor) -> list[bytes]:
    """Returns the elements of a BYTES output. Raises OpenAIError for another datatype."""
    if tensor.datatype != "BYTES":
        raise model_failure(
            f"the model gave output '{tensor.name}' of {tensor.datatype}, expected BYTES"
        )
    data = copy_from_shared_memory(tensor).data
    assert isinstance(data, (bytes, memoryview))
    return [element for part in split_strings(data) for element in part]


def read_number(tensor: Tensor) -> int | None:
    """Returns the sum of an integer output; None if it is empty."""
    if tensor.datatype not in ("INT32", "INT64", "UINT32", "UINT64"):
        return None
    data = copy_from_shared_memory(tensor).data
    assert isinstance(data, (bytes, memoryview))
    values = np.frombuffer(data, tensor.datatype.lower())
    return int(values.sum()) if values.size else None


def read_float(tensor: Tensor) -> float | None:
    """Returns the first element of a floating-point output; None if it is empty."""
    if tensor.datatype not in ("FP32", "FP64"):
        return None
    data = copy_from_shared_memory(tensor).data
    assert isinstance(data, (bytes, memoryview))
    values = np.frombuffer(data, "<f4" if tensor.datatype == "FP32" else "<f8")
    return float(values[0]) if values.size else None


STOP = "stop"
"""The finish reason of a whole text."""
_FINISH_REASONS = {
    **dict.fromkeys(["stop", "eos", "eos_token", "stop_sequence", "end_turn"], STOP),
    **dict.fromkeys(["length", "max_tokens"], "length"),
    "tool_calls": "tool_calls",
    "function_call": "function_call",
    "content_filter": "content_filter",
}


class Delta(msgspec.Struct):
    """What a response adds to a choice. `message` has members of OpenAI's delta object."""

    index: int
    message: dict[str, Any] = msgspec.field(default_factory=dict)
    finish_reason: str | None = None
    logprobs: Any = None


class ResponseReader(Protocol):
    """Reads the responses of one call.

    `stopped`: no further response is wanted. `usage`: token counts, None if nothing was counted.
    """

    stopped: bool

    @property
    def usage(self) -> dict[str, Any] | None:
        """The token counts of the call."""

    def read(self, response: InferResponse) -> list[Delta]:
        """Returns what a response adds. Raises OpenAIError."""

    def finish(self) -> list[Delta]:
        """Returns what the end of the call adds: held text, finish reasons."""


def check_decoupled(contract: Contract, meaning: str) -> None:
    """Raises OpenAIError for a model that gave no output of a meaning, unless it is decoupled.

    A decoupled model may have nothing to say.
    """
    if not contract.decoupled:
        name = next(name for name, given in contract.outputs.items() if given == meaning)
        raise model_failure(f"model '{contract.model}' gave no output '{name}'")


def raise_error(response: InferResponse) -> None:
    """Raises the error of a response as OpenAIError, if it has one."""
    if response.error is not None:
        raise from_host_error(response.error)


def finish_reason(model: str, reason: str) -> str:
    """Converts a finish reason of a model to OpenAI's. Raises OpenAIError for a failure."""
    if reason in ("abort", "error"):
        raise model_failure(f"model '{model}' ended with finish reason '{reason}'")
    return _FINISH_REASONS.get(reason, STOP)


def usage_object(prompt: int, completion: int) -> dict[str, Any]:
    """Returns the usage object of OpenAI."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def parse_json(text: bytes) -> Any:
    """Returns the value of a JSON text; None if the text is not JSON."""
    try:
        return json.parse(text)
    except HostError:
        return None
