"""Converts the fields of a request to the inputs and parameters of a model."""

from __future__ import annotations

import base64
import binascii
import random
import re
from collections.abc import Iterator, Sequence, Set
from typing import Any

import numpy as np

from host.errors import HostError
from host.frontends.http import json_text as json
from host.frontends.http.tensors import flatten, read_numbers
from host.frontends.openai.contract import Contract, Input
from host.frontends.openai.fields import (
    CHAT,
    COMPLETIONS,
    IMAGES,
    KNOWN_FIELDS,
    SPEECH,
    TRANSCRIPTIONS,
    Fields,
    scheduling_field,
)
from host.frontends.openai.openai_errors import invalid_type, invalid_value, unsupported_field
from host.frontends.openai.outputs import wants_logprobs
from host.frontends.openai.tool_calls import demanded_schema
from host.inference.request import InferRequest, Parameter, Tensor, serialize_bytes

SOURCE_OF_PART = {"image_url": "images", "input_audio": "audio"}
"""The source of inputs that takes a part of a message, by the type of the part."""

_IMAGE = re.compile(r"data:image/(?:png|jpeg|webp|gif);base64,")


def read_media(messages: list[Any], kind: str, as_base64: bool) -> list[str | bytes]:
    """Returns the images or the sounds of messages in their order; `kind` is a type of parts.

    They are bytes, or texts of base64. Raises OpenAIError if one is not base64.
    """
    media: list[str | bytes] = []
    for place, part in _parts(messages):
        if part["type"] != kind:
            continue
        if kind == "image_url":
            place, text = f"{place}.image_url.url", part["image_url"]["url"]
            head = _IMAGE.match(text)
            if head is None:
                raise invalid_value(
                    f"'{place}' must begin with data:image/png;base64, or have the type jpeg, webp"
                    " or gif",
                    place,
                )
            text = text[head.end() :]
        else:
            place, text = f"{place}.input_audio.data", part["input_audio"]["data"]
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise invalid_value(f"'{place}' must be base64", place) from None
        media.append(text if as_base64 else data)
    return media


def _parts(messages: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, message in enumerate(messages):
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            yield f"messages[{index}].content[{at}]", part


_INTEGERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
_SAMPLING = (
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "max_tokens",
)
"""The fields of OpenAI that `sampling_parameters` can carry."""

_NEVER_PARAMETERS = frozenset(
    "model messages prompt input tools tool_choice response_format functions function_call stream"
    " stream_options n echo dimensions best_of encoding_format max_completion_tokens logprobs"
    " top_logprobs reasoning_effort verbosity modalities service_tier store metadata"
    " safety_identifier prompt_cache_key parallel_tool_calls user chat_template_kwargs"
    " continue_final_message documents".split()
)
_RESERVED = frozenset(
    "sequence_id sequence_start sequence_end headers binary_data_output openai_route".split()
)
SCHEDULING_FIELDS = ("priority", "timeout")
"""Fields that the core reads, as on /v2, unless the model has an input of that name."""

_DEFAULT_MAX_TOKENS = {CHAT: 1024}
_COMPLETION_TOKENS = 16
_ROUTE_PARAMETERS = {
    CHAT: "chat/completions",
    TRANSCRIPTIONS: "audio/transcriptions",
    IMAGES: "images/generations",
    SPEECH: "audio/speech",
}
_NO_PARAMETERS = {
    TRANSCRIPTIONS: ("file", "include", "chunking_strategy"),
    IMAGES: ("moderation", "partial_images"),
    SPEECH: ("stream_format",),
}
"""Fields that are neither refused nor become parameters, by route."""


def build_request(
    contract: Contract,
    fields: Fields,
    route: str,
    prompt: str | list[int] | None,
    version: int,
    request_id: str,
) -> InferRequest:
    """Builds the request for one prompt and one choice. Raises OpenAIError."""
    request = InferRequest(contract.model, [], version, request_id)
    request.requested_outputs = list(contract.outputs)
    filled: set[str] = set()
    for entry in contract.inputs:
        value = _source_value(contract, entry, fields, route, prompt)
        if value is not None:
            filled.add(entry.source)
            request.inputs.append(encode_input(entry, value))
    if isinstance(prompt, list) and "tokens" not in filled and not contract.takes_whole_request:
        raise unsupported_field(
            f"model '{contract.model}' takes text, not token ids; with LangChain, set"
            " check_embedding_ctx_length=False",
            "prompt",
        )
    request.parameters = build_parameters(contract, fields, route, filled)
    set_scheduling(request, contract, fields)
    return request


def set_scheduling(request: InferRequest, contract: Contract, fields: Fields) -> None:
    """Sets priority and timeout of a request as its fields say. Raises OpenAIError."""
    if "priority" in fields and not contract.takes("priority"):
        request.priority = scheduling_field("priority", fields["priority"])
    if "timeout" in fields and not contract.takes("timeout"):
        request.timeout_us = scheduling_field("timeout", fields["timeout"])


def build_parameters(
    contract: Contract, fields: Fields, route: str, filled: Set[str]
) -> dict[str, Parameter]:
    """Returns the fields without an input as parameters of a request. Raises OpenAIError.

    `filled`: the sources of the inputs that the request has.
    """
    carried = contract.takes_whole_request
    sampling = contract.takes("sampling")
    parameters: dict[str, Parameter] = {}
    for name, value in fields.items():
        if name in filled or name in _NEVER_PARAMETERS or name in SCHEDULING_FIELDS or carried:
            continue
        if name in _NO_PARAMETERS.get(route, ()):
            continue
        if sampling and (name in _SAMPLING or name not in KNOWN_FIELDS[route]):
            continue
        if name == "stop":
            continue  # the host searches the text
        if name in _RESERVED or name.startswith("triton_"):
            raise unsupported_field(f"'{name}' is reserved and cannot be sent", name)
        if contract.cached:
            raise unsupported_field(
                f"model '{contract.model}' does not take '{name}': it has a response cache and no"
                f" input '{name}'",
                name,
            )
        parameters[name] = _parameter(value)
    parameters["openai_route"] = _ROUTE_PARAMETERS.get(route, route)
    if "user" in fields:
        parameters["user"] = fields["user"]
    return parameters


def _source_value(
    contract: Contract, entry: Input, fields: Fields, route: str, prompt: str | list[int] | None
) -> Any:
    """Returns the value of an input as JSON types; None leaves the input out."""
    match entry.source:
        case "prompt":
            return prompt if isinstance(prompt, str) else None
        case "tokens":
            return prompt if isinstance(prompt, list) else None
        case "messages":
            return dump_text(fields["messages"]) if "messages" in fields else None
        case "request":
            return dump_text(fields)
        case "sampling":
            return dump_text(_sampling(contract, fields, route))
        case "stream":
            return fields.get("stream", False)
        case "no_echo" | "yes":
            return True
        case "nothing":
            return None
        case "wants_logprobs":
            return wants_logprobs(fields)
        case "schema":
            return demanded_schema(contract, fields)
        case "guide_type":
            return "json_schema" if demanded_schema(contract, fields) is not None else None
        case "images" | "audio" if "messages" in fields:
            kind = next(kind for kind, taker in SOURCE_OF_PART.items() if taker == entry.source)
            as_base64 = entry.source == "images" and contract.backend == "vllm"
            return read_media(fields["messages"], kind, as_base64) or None
        case "audio" if "file" in fields:
            return fields["file"]
        case "images" | "audio":
            return None
    return fields.get(entry.source)


def _sampling(contract: Contract, fields: Fields, route: str) -> Fields:
    """Returns the content of `sampling_parameters`, as the vLLM backend of Triton reads it."""
    chosen = {name: fields[name] for name in _SAMPLING if name in fields}
    chosen.setdefault("max_tokens", _DEFAULT_MAX_TOKENS.get(route, _COMPLETION_TOKENS))
    if wants_logprobs(fields):
        name = "logprobs" if route == COMPLETIONS else "top_logprobs"
        chosen["logprobs"] = fields.get(name, 0)
    schema = demanded_schema(contract, fields)
    if schema is not None:  # the backend parses this text a second time
        chosen["structured_outputs"] = dump_text({"json": schema})
    elif fields.get("response_format", {}).get("type") in ("json_object", "json_schema"):
        chosen["structured_outputs"] = dump_text({"json_object": True})
    others = {
        name: value
        for name, value in fields.items()
        if name not in KNOWN_FIELDS[route]
        and name not in _NEVER_PARAMETERS
        and name not in SCHEDULING_FIELDS
        and not contract.takes(name)
    }
    return {**chosen, **others}


def _parameter(value: Any) -> Parameter:
    if type(value) in (bool, str, float) or json.is_signed(value):
        plain: Parameter = value
        return plain
    return dump_text(value)


def dump_text(value: Any) -> str:
    """Writes a value as JSON text."""
    return json.dump(value).decode()


def encode_input(entry: Input, value: Any) -> Tensor:
    """Converts a JSON value to a tensor. Raises OpenAIError."""
    values = flatten(value) if isinstance(value, list) else [value]
    datatype = entry.datatype
    if datatype == "BYTES":
        texts = [_element(item) for item in ([value] if entry.source in _JSON_SOURCES else values)]
        data = serialize_bytes(texts)
        return Tensor(entry.name, datatype, _shape(entry, len(texts)), data)
    limits = np.iinfo(datatype.lower() if datatype in _INTEGERS else "int64")
    for item in values:
        if datatype == "BOOL":
            fits = type(item) is bool
        elif datatype in _INTEGERS:
            fits = type(item) is int and limits.min <= item <= limits.max
        else:
            fits = type(item) in (int, float)
        if not fits:
            raise invalid_type(entry.source, f"{_expected(datatype)} of {datatype}", item)
    try:
        data = read_numbers(datatype, values)
    except HostError:
        raise invalid_type(entry.source, f"{_expected(datatype)} of {datatype}", value) from None
    return Tensor(entry.name, datatype, _shape(entry, len(values)), data)


def _element(value: Any) -> bytes:
    """Returns an element of a BYTES input: a text as it is, other values as JSON."""
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else json.dump(value)


_JSON_SOURCES = ("tools", "tool_choice", "response_format", "schema", "metadata", "logit_bias")


def _expected(datatype: str) -> str:
    return {"BOOL": "a boolean"}.get(
        datatype, "an integer" if datatype in _INTEGERS else "a number"
    )


def _shape(entry: Input, count: int) -> list[int]:
    """Returns a shape of `count` elements; the innermost variable dimension takes them."""
    dims: Sequence[int] = entry.dims
    shape = [1 if dim == -1 else dim for dim in dims]
    for index in range(len(dims) - 1, -1, -1):
        if dims[index] == -1:
            shape[index] = count
            return shape
    fixed = 1
    for dim in shape:
        fixed *= dim
    if fixed != count:
        raise unsupported_field(
            f"input '{entry.name}' takes {fixed} elements, got {count}", entry.source
        )
    return shape


def choice_fields(contract: Contract, fields: Fields, count: int) -> list[Fields]:
    """Returns the fields of each of several choices, which differ in their seeds.

    Choices without a seed get random ones: equal defaults of the model would make equal choices.
    """
    takes_seed = contract.takes("seed") or contract.takes("sampling")
    if count == 1 or not takes_seed:
        return [fields] * count
    if "seed" not in fields:
        return [{**fields, "seed": random.getrandbits(31)} for _ in range(count)]
    return [{**fields, "seed": (fields["seed"] + index) % (1 << 63)} for index in range(count)]
