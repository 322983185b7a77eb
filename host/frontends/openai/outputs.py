"""What the responses of a model add to choices: deltas, log probabilities, and pieces of texts."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from host.errors import HostError
from host.frontends.http import json_text as json
from host.frontends.http.tensors import split_strings
from host.frontends.openai.contract import Contract
from host.frontends.openai.openai_errors import model_failure
from host.inference.request import InferResponse, Tensor, copy_from_shared_memory

_LOWEST = -9999.0
"""What OpenAI gives for a probability of 0, whose logarithm JSON cannot have."""


class LogprobsWriter:
    """Writes the log probabilities of one choice, in the form of chats or of completions.

    `alternatives`: how many of the most likely tokens are listed for each token.
    """

    def __init__(self, is_chat: bool, alternatives: int) -> None:
        self._is_chat = is_chat
        self._alternatives = alternatives
        self._offset = 0  # characters of the tokens so far

    def write(self, tokens: list[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any] | None:
        """Returns the log probabilities of the next tokens; None if there are none.

        Each token is an object of alternatives by token id, which have `decoded_token`, `logprob`
        and `rank`. The first alternative is the token of the text. Raises ValueError.
        """
        try:
            listed = [list(token.values()) for token in tokens if token]
            written = [self._chat(token) for token in listed] if self._is_chat else []
            if self._is_chat:
                return {"content": written, "refusal": None} if written else None
            return self._completion(listed) if listed else None
        except (AttributeError, TypeError) as error:
            raise ValueError(str(error)) from None

    def _chat(self, token: list[Mapping[str, Any]]) -> dict[str, Any]:
        top = [_entry(one) for one in self._most_likely(token)]
        return {**_entry(token[0]), "top_logprobs": top}

    def _completion(self, tokens: list[list[Mapping[str, Any]]]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(_text(token[0]))
        return {
            "tokens": [_text(token[0]) for token in tokens],
            "token_logprobs": [_logprob(token[0]) for token in tokens],
            "top_logprobs": [
                {_text(one): _logprob(one) for one in self._most_likely(token)} for token in tokens
            ],
            "text_offset": offsets,
        }

    def _most_likely(self, token: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return sorted(token, key=_rank)[: self._alternatives]


def join_logprobs(first: Any, second: Any) -> Any:
    """Returns the log probabilities of two parts of one choice: their lists are joined."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return first if second is None else second
    joined = {**first, **second}
    for name, values in first.items():
        if isinstance(values, list) and isinstance(second.get(name), list):
            joined[name] = values + second[name]
    return joined


def _entry(token: Mapping[str, Any]) -> dict[str, Any]:
    text = _text(token)
    return {"token": text, "logprob": _logprob(token), "bytes": list(text.encode())}


def _text(token: Mapping[str, Any]) -> str:
    return str(token.get("decoded_token") or "")


def _logprob(token: Mapping[str, Any]) -> float:
    value = float(token["logprob"] if token.get("logprob") is not None else _LOWEST)
    return value if math.isfinite(value) else _LOWEST


def _rank(token: Mapping[str, Any]) -> float:
    rank = token.get("rank")
    return rank if isinstance(rank, (int, float)) else math.inf


def wants_logprobs(fields: Mapping[str, Any]) -> bool:
    """Returns whether the client wants log probabilities; in completions, 0 means yes."""
    wanted = fields.get("logprobs")
    return wanted is not None and wanted is not False


class StopSearch:
    """Searches a text, which comes in pieces, for the first of several stop sequences.

    It holds back the longest end of the text that may begin a stop sequence.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def feed(self, piece: str) -> str:
        """Returns the text that is certain by now; nothing after a stop sequence."""
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._held + piece
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            return text[: min(ends)]
        keep = possible_start(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns the text that was held back; the text is complete."""
        held, self._held = self._held, ""
        return held


def possible_start(text: str, searched: Sequence[str]) -> int:
    """Returns the length of the longest end of the text that begins one of the searched texts."""
    longest = max(map(len, searched), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(one.startswith(text[-length:]) for one in searched):
            return length
    return 0


def utf8_decoder() -> codecs.IncrementalDecoder:
    """Returns a decoder that holds half characters back; invalid bytes become U+FFFD."""
    return codecs.getincrementaldecoder("utf-8")("replace")


class JsonObjectEnd:
    """Finds the end of a JSON object in the pieces of a text."""

    _outside = re.compile(r'["{}]')
    _inside = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._skip = 0  # characters of the next piece that are escaped
        self._depth = 0
        self._in_string = False

    def find(self, text: str, start: int = 0) -> int:
        """Returns the place after the object in the next piece, read from `start`.

        Returns 0 if the object is not complete.
        """
        at = start + self._skip
        while at < len(text):
            found = (self._inside if self._in_string else self._outside).search(text, at)
            if found is None:
                at = len(text)
                break
            at = found.end()
            match found[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    at += 1  # the next character is escaped
                case "{":
                    self._depth += 1
                case "}":
                    self._depth -= 1
                    if not self._depth:
                        return at
        self._skip = max(at - len(text), 0)
        return 0


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


def check_decoupled(contract: Contract, meaning: str) -> None:
    """Raises OpenAIError for a model that gave no output of a meaning, unless it is decoupled.

    A decoupled model may have nothing to say.
    """
    if not contract.decoupled:
        name = next(name for name, given in contract.outputs.items() if given == meaning)
        raise model_failure(f"model '{contract.model}' gave no output '{name}'")


def raise_error(response: InferResponse) -> None:
    """Raises the error of a response, if it has one."""
    error = response.error
    if error is not None:
        raise HostError(error.code, error.message)  # a traceback of its own would keep the response


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
