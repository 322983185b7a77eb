"""The requests of a load, made before it begins: from metadata, files, or a recording."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from host.client.http_transport import replace_headers, to_http
from host.client.messages import EMPTY_FINAL, add_input, new_request, set_parameter
from host.client.signature import EncodedTensor, TensorSpec, encode_tensor, encode_values
from host.errors import invalid_argument, not_found, unsupported
from host.inference.request import Parameter
from host.load_generator.http2_connection import frame_message
from host.load_generator.job import Protocol, Target
from host.recording.recording import RecordingReader
from pb_utils import Tensor
from pb_utils._datatypes import SIZES
from pb_utils._text_form import InvalidInput, read_inputs

MOST_BYTES = 1 << 30
"""The bytes of all requests of a load, which stay in memory."""

_METHODS = {Protocol.GRPC: "ModelInfer", Protocol.GRPC_STREAM: "ModelStreamInfer"}
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")


@dataclass(frozen=True)
class Inputs:
    """Where the inputs come from.

    `given`: NAME=VALUE pairs, as `pbhost infer` reads them; others are random, or zero. `shapes`:
    of inputs with variable dimensions, by name. `data`: a file or folder, as perf_analyzer reads
    it. `recording`: a folder of `pbhost record`.
    """

    given: Sequence[tuple[str, str]] = ()
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    batch_size: int = 1
    zero: bool = False
    string_length: int = 0
    data: str = ""
    recording: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


def make_inferences(
    config: Mapping[str, Any], model: str, version: str, inputs: Inputs
) -> list[Any]:
    """Returns the messages of the requests to send, again and again.

    Raises HostError, and InvalidInput for inputs that do not match the model.
    """
    if inputs.recording:
        return _read_recording(Path(inputs.recording), model, version, inputs.parameters)
    config = _with_shapes(config, inputs.shapes)
    if inputs.batch_size > max(1, config["max_batch_size"]):
        raise InvalidInput(
            f"--batch-size: expected at most max_batch_size {config['max_batch_size']}, got"
            f" {inputs.batch_size}"
            if config["max_batch_size"]
            else "--batch-size: the server shows no max_batch_size above 0 for this model"
        )
    if inputs.data:
        found = _read_data(Path(inputs.data), config)
    else:
        found = [_make_inputs(config, inputs)]
    messages = []
    for tensors in found:
        message = new_request(model, version, parameters=inputs.parameters)
        for tensor in tensors:
            if config["max_batch_size"]:
                tensor = _to_batch(tensor, inputs.batch_size)
            add_input(message, tensor)
        messages.append(message)
    return messages


def _to_batch(tensor: EncodedTensor, size: int) -> EncodedTensor:
    """Raises InvalidInput for an input that has another batch."""
    batch, *shape = tensor.shape
    if size == 1 or batch == size:
        return tensor
    if batch != 1:
        raise InvalidInput(f"--batch-size: input '{tensor.name}' has a batch of {batch}")
    return tensor._replace(shape=(size, *shape), content=size * bytes(tensor.content))


def _with_shapes(
    config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> Mapping[str, Any]:
    """Fills in the dimensions of inputs. Raises InvalidInput."""
    entries = {entry["name"]: entry for entry in config["input"]}
    for name, shape in shapes.items():
        if name not in entries:
            raise InvalidInput(f"--shape: the model has no input '{name}'{_names(entries)}")
        dims = entries[name]["dims"]
        if len(dims) != len(shape) or any(
            known not in (-1, size) for known, size in zip(dims, shape, strict=True)
        ):
            raise InvalidInput(
                f"--shape: expected dimensions {dims} for input '{name}', without the batch, got"
                f" {list(shape)}"
            )
        entries[name] = {**entries[name], "dims": list(shape)}
    return {**config, "input": list(entries.values())}


def _names(entries: Mapping[str, Any]) -> str:
    return f"; its inputs are {', '.join(sorted(entries))}" if entries else ""


def _make_inputs(config: Mapping[str, Any], inputs: Inputs) -> list[EncodedTensor]:
    """Makes one request: inputs that are not given are random, or zero. Raises InvalidInput."""
    from_metadata = "name" not in config  # which do not say what is optional
    given = dict(inputs.given)
    made = {
        entry["name"]: "random"
        for entry in config["input"]
        if entry["name"] not in given and (from_metadata or not entry.get("optional"))
    }
    tensors = []
    for name, value in read_inputs([*inputs.given, *made.items()], config).items():
        tensor = encode_tensor(value if isinstance(value, Tensor) else Tensor(name, value))
        texts = math.prod(tensor.shape) if tensor.datatype == "BYTES" else 0
        if name in made and inputs.zero:
            zeros = bytes(4 * texts) if texts else bytes(tensor.byte_size)
            tensor = tensor._replace(content=zeros)
        elif name in made and texts and inputs.string_length:
            tensor = tensor._replace(content=_random_texts(texts, inputs.string_length))
        tensors.append(tensor)
    return tensors


def _random_texts(count: int, length: int) -> bytes:
    random = np.random.default_rng(0)
    letters = random.integers(97, 123, (count, length)).astype(np.uint8)
    return _encode_texts([text.tobytes() for text in letters])


def _encode_texts(texts: Sequence[str | bytes]) -> bytes:
    return encode_values(TensorSpec("", "BYTES", ()), texts)


def _read_data(path: Path, config: Mapping[str, Any]) -> list[list[EncodedTensor]]:
    """Reads data in the form of perf_analyzer's --input-data. Raises HostError or InvalidInput."""
    entries = {entry["name"]: entry for entry in config["input"]}
    if path.is_dir():
        found = {
            name: {"b64": base64.b64encode(_read_file(path / name)).decode()}
            for name in entries
            if (path / name).exists()
        }
        steps: list[Any] = [found]
    else:
        steps = _steps_of(path, _load_json(path))
    requests = []
    for number, step in enumerate(steps, 1):
        place = f"'{path}', request {number}"
        if not isinstance(step, dict):
            raise InvalidInput(f"{place}: expected an object with the inputs")
        unknown = sorted(set(step) - set(entries))
        if unknown:
            known = _names(entries)
            raise InvalidInput(f"{place}: the model has no input '{unknown[0]}'{known}")
        missing = [name for name, entry in entries.items() if name not in step]
        missing = [name for name in missing if not entries[name].get("optional")]
        if missing:
            raise InvalidInput(f"{place}: input '{missing[0]}' is missing")
        tensors = []
        for name, value in step.items():
            try:
                tensors.append(_read_value(entries[name], value, config["max_batch_size"]))
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise InvalidInput(f"{place}, input '{name}': {error}") from error
        requests.append(tensors)
    return requests


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise not_found(f"'{path}' cannot be read: {error.strerror}") from error


def _load_json(path: Path) -> Any:
    try:
        return json.loads(_read_file(path))
    except ValueError as error:
        raise invalid_argument(f"'{path}' is not JSON: {error}") from error


def _steps_of(path: Path, document: Any) -> list[Any]:
    """The requests of a file; lists of them, as sequences have, are joined."""
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, list) or not data:
        raise InvalidInput(f"'{path}': expected an object with a list 'data' of requests")
    return [step for part in data for step in (part if isinstance(part, list) else [part])]


def _read_value(entry: Mapping[str, Any], value: Any, most_batch: int) -> EncodedTensor:
    """Reads a list of values, or an object with `content` or `b64`, and maybe `shape`."""
    name, datatype = entry["name"], entry["data_type"].removeprefix("TYPE_")
    datatype = "BYTES" if datatype == "STRING" else datatype
    shape: list[int] = list(entry["dims"])
    if isinstance(value, dict):
        shape = [int(size) for size in value.get("shape", shape)]
        value = value if "b64" in value else value["content"]
    if isinstance(value, dict):
        content = base64.b64decode(value["b64"])
        size = SIZES.get(datatype, 0)
        if not size:
            content, count = _encode_texts([content]), 1
        elif len(content) % size:
            raise ValueError(f"{len(content)} bytes for {datatype} {shape}")
        else:
            count = len(content) // size
    else:
        flat = np.array(value, dtype=np.object_).ravel().tolist()
        if datatype == "BYTES":
            flat = [str(text) for text in flat] or [""]
        elif datatype == "BOOL":
            flat = [bool(one) for one in flat]
        try:
            count, content = len(flat), encode_values(TensorSpec(name, datatype, ()), flat)
        except (ValueError, TypeError) as error:
            raise ValueError(f"expected {datatype}, {error}") from error
    shape = _fill(shape, count)
    return EncodedTensor(name, datatype, (1, *shape) if most_batch else tuple(shape), content)


def _fill(shape: Sequence[int], count: int) -> list[int]:
    """Gives the only variable dimension its size. Raises ValueError if the number does not fit."""
    known = int(np.prod([size for size in shape if size >= 0]))
    filled = list(shape)
    if filled.count(-1) == 1 and known and count % known == 0:
        filled[filled.index(-1)] = count // known
    if -1 in filled or int(np.prod(filled)) != count:
        raise ValueError(f"{count} elements do not fit the shape {list(shape)}: give a 'shape'")
    return filled


def _read_recording(
    folder: Path, model: str, version: str, parameters: Mapping[str, Parameter]
) -> list[Any]:
    """The requests to the model in a recording; all, if none of them is to it. Raises HostError."""
    with RecordingReader(folder) as reader:
        requests = list(reader.requests())
        own = [request for request in requests if request.model == model]
        if not own:
            raise not_found(f"the recording in '{folder}' has no request to model '{model}'")
        found, size = [], 0
        for request in own:
            if any(name in request.parameters for name in _SEQUENCE):
                raise unsupported(
                    f"the recording in '{folder}' has sequences, whose order a load does not keep:"
                    " use pbhost replay"
                )
            message = new_request(
                model, version or request.version, "", request.requested_outputs,
                {**request.parameters, **parameters},
            )  # fmt: skip
            for one in request.inputs:
                size += one.size
                _check_size(size)
                content = reader.read_tensor(one)
                add_input(message, EncodedTensor(one.name, one.datatype, tuple(one.shape), content))
            found.append(message)
    return found


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise unsupported(
            f"the requests have more than {MOST_BYTES >> 20} MiB, which a load keeps in memory:"
            " give fewer of them"
        )


def make_sequence(messages: Sequence[Any], length: int, number: int) -> Iterator[Any]:
    """Yields the requests of a sequence with this id."""
    for index in range(length):
        message = messages[index % len(messages)]
        yield sequence_step(message, number, index == 0, index == length - 1)


def sequence_step(message: Any, number: int, start: bool, end: bool) -> Any:
    """Returns a request as one of the sequence with this id."""
    step = deepcopy(message)
    set_parameter(step, "sequence_id", number)
    set_parameter(step, "sequence_start", start)
    set_parameter(step, "sequence_end", end)
    return step


def make_target(
    url: str,
    protocol: Protocol,
    headers: Mapping[str, str],
    certificates: tuple[str, str, str] = ("", "", ""),
) -> Target:
    """Returns the target for a valid URL with a port. Raises HostError for the headers."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 0
    tls = parts.scheme in ("https", "grpcs")
    if protocol not in _METHODS:
        return Target(host, port, tls, protocol, certificates=certificates)
    fields = {
        ":method": "POST",
        ":scheme": "https" if tls else "http",
        ":path": f"/inference.GRPCInferenceService/{_METHODS[protocol]}",
        ":authority": parts.netloc,
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "pbhost-bench",
        **{name.lower(): value for name, value in headers.items()},
    }
    encoded = [(name.encode(), text.encode()) for name, text in fields.items()]
    return Target(host, port, tls, protocol, encoded, certificates)


def encode_chains(
    chains: Iterable[Iterable[Any]], url: str, protocol: Protocol, headers: Mapping[str, str]
) -> list[list[bytes]]:
    """Returns chains of requests as they are sent. Raises HostError if all are too large."""
    encoded: list[list[bytes]] = []
    size = 0
    for messages in chains:
        chain = []
        for request in _encode(messages, url, protocol, headers):
            size += len(request)
            _check_size(size)
            chain.append(request)
        encoded.append(chain)
    return encoded


def _encode(
    messages: Iterable[Any], url: str, protocol: Protocol, headers: Mapping[str, str]
) -> Iterator[bytes]:
    for message in messages:
        if protocol is Protocol.HTTP:
            request = to_http("ModelInfer", message)
            named = replace_headers(request.headers, headers)
            yield encode_post(url, request.path, b"".join(request.body), named)
        else:
            if protocol is Protocol.GRPC_STREAM:
                message.parameters[EMPTY_FINAL].bool_param = True
            yield frame_message(message.SerializeToString())


def encode_post(url: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """Returns a request of HTTP/1.1."""
    parts = urlsplit(url)
    lines = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1"]
    sent = replace_headers({"Host": parts.netloc}, headers)
    lines += [f"{name}: {value}" for name, value in sent.items()]
    lines += [f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


@dataclass(frozen=True)
class Prompts:
    """The requests to `/v1`. `api`: chat, completions or embeddings. `data`: a file with bodies."""

    api: str
    model: str
    texts: Sequence[str]
    max_tokens: int = 0
    stream: bool = True
    data: str = ""

    @property
    def path(self) -> str:
        """The path of the API."""
        return {"chat": "/v1/chat/completions"}.get(self.api, f"/v1/{self.api}")

    @property
    def protocol(self) -> Protocol:
        """Whether responses are events."""
        streams = self.stream and self.api != "embeddings"
        return Protocol.HTTP_EVENTS if streams else Protocol.HTTP

    def encode(self, url: str, headers: Mapping[str, str]) -> list[bytes]:
        """Returns the requests as they are sent. Raises HostError and InvalidInput."""
        headers = replace_headers({"Content-Type": "application/json"}, headers)
        return [
            encode_post(url, self.path, json.dumps(body).encode(), headers)
            for body in self._bodies()
        ]

    def _bodies(self) -> Iterator[dict[str, Any]]:
        common: dict[str, Any] = {"model": self.model}
        if self.api != "embeddings":
            if self.stream:
                common["stream"] = True
            if self.max_tokens:
                common["max_tokens"] = self.max_tokens
        if self.data:
            path = Path(self.data)
            for number, step in enumerate(_steps_of(path, _load_json(path)), 1):
                payload = step.get("payload", step) if isinstance(step, dict) else None
                for body in payload if isinstance(payload, list) else [payload]:
                    if not isinstance(body, dict):
                        raise InvalidInput(f"'{path}', request {number}: expected an object")
                    yield {**common, **body}
            return
        for text in self.texts:
            match self.api:
                case "chat":
                    yield {**common, "messages": [{"role": "user", "content": text}]}
                case "completions":
                    yield {**common, "prompt": text}
                case _:
                    yield {**common, "input": text}
