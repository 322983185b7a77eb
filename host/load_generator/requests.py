"""The requests of a load, made before it begins: from metadata, files, or a recording."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from host.cli.inference_clients import (
    EMPTY_FINAL,
    HEADER_LENGTH,
    Inference,
    Parameter,
    content_of,
    model_path,
    received_tensor,
    request_header,
    to_message,
)
from host.errors import HostError, invalid_argument, not_found, unsupported
from host.load_generator.http2_connection import frame_message
from host.load_generator.job import Protocol, Target
from host.recording.recording import RecordingReader
from pb_utils import Tensor
from pb_utils._datatypes import CODES, SIZES
from pb_utils._text_form import InvalidInput, read_inputs

MOST_BYTES = 1 << 30
"""The bytes of all requests of a load, which stay in memory."""

_METHODS = {Protocol.GRPC: "ModelInfer", Protocol.GRPC_STREAM: "ModelStreamInfer"}
_PORTS = {"http": 8000, "grpc": 8001, "https": 443, "grpcs": 443}
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
) -> list[Inference]:
    """Returns the requests to send, again and again.

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
        found = _read_data(Path(inputs.data), config, inputs.batch_size)
    else:
        found = [_make_inputs(config, inputs)]
    return [
        Inference(model, version, "", tensors, parameters=inputs.parameters) for tensors in found
    ]


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


def _make_inputs(config: Mapping[str, Any], inputs: Inputs) -> list[Tensor]:
    """Makes one request: inputs that are not given are random, or zero. Raises InvalidInput."""
    from_metadata = "name" not in config  # which do not say what is optional
    given = dict(inputs.given)
    made = {
        entry["name"]: "random"
        for entry in config["input"]
        if entry["name"] not in given and (from_metadata or not entry.get("optional"))
    }
    values = read_inputs([*inputs.given, *made.items()], config)
    batched = config["max_batch_size"] > 0
    tensors = []
    for name, value in values.items():
        tensor = value if isinstance(value, Tensor) else Tensor(name, value)
        if name in made and not isinstance(value, Tensor):
            if inputs.zero:
                value = np.full_like(value, b"" if value.dtype == np.object_ else 0)
            elif inputs.string_length and value.dtype == np.object_:
                value = _random_texts(value.shape, inputs.string_length)
            tensor = Tensor(name, value)
        if batched and inputs.batch_size > 1 and not isinstance(value, Tensor):
            tensor = Tensor(name, _to_batch(name, value, inputs.batch_size))
        tensors.append(tensor)
    return tensors


def _to_batch(name: str, value: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    if value.shape[0] not in (1, size):
        raise InvalidInput(f"--batch-size: input '{name}' has a batch of {value.shape[0]}")
    return value if value.shape[0] == size else np.repeat(value, size, axis=0)


def _random_texts(shape: Sequence[int], length: int) -> npt.NDArray[Any]:
    random = np.random.default_rng(0)
    texts = np.empty(int(np.prod(shape)), np.object_)
    for index in range(len(texts)):
        texts[index] = bytes(random.integers(97, 123, length).astype(np.uint8))
    return texts.reshape(shape)


def _read_data(path: Path, config: Mapping[str, Any], batch: int) -> list[list[Tensor]]:
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
                tensors.append(_read_value(entries[name], value, config["max_batch_size"], batch))
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


def _read_value(entry: Mapping[str, Any], value: Any, most_batch: int, batch: int) -> Tensor:
    """Reads a list of values, or an object with `content` or `b64`, and maybe `shape`."""
    name, datatype = entry["name"], entry["data_type"].removeprefix("TYPE_")
    datatype = "BYTES" if datatype == "STRING" else datatype
    shape: list[int] = list(entry["dims"])
    if isinstance(value, dict):
        shape = [int(size) for size in value.get("shape", shape)]
        value = value if "b64" in value else value["content"]
    if isinstance(value, dict):
        content = base64.b64decode(value["b64"])
        array = None
        size = SIZES.get(datatype, 0)
        count = len(content) // size if size else 1
        if not size:
            content = len(content).to_bytes(4, "little") + content
    else:
        flat = np.array(value, dtype=np.object_).ravel()
        if datatype == "BYTES":
            array = np.array([str(text).encode() for text in flat] or [b""], np.object_)
        else:
            array = flat.astype(_storage(datatype))
        count, content = array.size, b""
    shape = _fill(shape, count)
    if most_batch > 0:
        shape = [1, *shape]
    if array is not None:
        tensor = Tensor(name, array.reshape(shape))
    else:
        try:
            tensor = received_tensor(name, datatype, shape, content)
        except HostError as error:
            raise ValueError(f"{len(content)} bytes for {datatype} {shape}") from error
    if most_batch > 0 and batch > 1:
        tensor = Tensor(name, np.repeat(tensor.as_numpy(), batch, axis=0))
    return tensor


def _storage(datatype: str) -> np.dtype[Any]:
    from pb_utils._datatypes import STORAGE

    if datatype == "BF16" or datatype not in CODES:
        raise ValueError(f"{datatype} needs its bytes, as b64")
    return np.dtype(STORAGE[CODES[datatype]])


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
) -> list[Inference]:
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
            tensors = [
                received_tensor(one.name, one.datatype, one.shape, reader.read_tensor(one))
                for one in request.inputs
            ]
            size += sum(one.size for one in request.inputs)
            _check_size(size)
            found.append(
                Inference(
                    model, version or request.version, "", tensors, request.requested_outputs,
                    {**request.parameters, **parameters},
                )
            )  # fmt: skip
    return found


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise unsupported(
            f"the requests have more than {MOST_BYTES >> 20} MiB, which a load keeps in memory:"
            " give fewer of them"
        )


def make_sequences(
    inferences: Sequence[Inference], length: int, senders: int, first_id: int
) -> list[list[Inference]]:
    """Returns a sequence for each sender, with an id of its own, which it sends again and again."""
    chains = []
    for number in range(first_id, first_id + senders):
        steps = [inferences[index % len(inferences)] for index in range(length)]
        chains.append(
            [
                replace(
                    step,
                    parameters={
                        **step.parameters,
                        "sequence_id": number,
                        "sequence_start": index == 0,
                        "sequence_end": index == length - 1,
                    },
                )
                for index, step in enumerate(steps)
            ]
        )
    return chains


def make_target(url: str, protocol: Protocol, headers: Mapping[str, str]) -> Target:
    """Returns the target for a URL, which must be valid. Raises HostError for the headers."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or _PORTS[parts.scheme]
    tls = parts.scheme in ("https", "grpcs")
    if protocol not in _METHODS:
        return Target(host, port, tls, protocol)
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
    return Target(
        host, port, tls, protocol, [(name.encode(), text.encode()) for name, text in fields.items()]
    )


def encode_chain(
    inferences: Sequence[Inference], url: str, protocol: Protocol, headers: Mapping[str, str]
) -> list[bytes]:
    """Returns requests as they are sent. Raises HostError for one that cannot be sent."""
    chain, size = [], 0
    for inference in inferences:
        try:
            encoded = (
                _encode_http(inference, url, headers)
                if protocol is Protocol.HTTP
                else frame_message(_encode_grpc(inference, protocol))
            )
        except (TypeError, ValueError) as error:
            raise invalid_argument(f"a request cannot be sent: {error}") from error
        size += len(encoded)
        _check_size(size)
        chain.append(encoded)
    return chain


def _encode_grpc(inference: Inference, protocol: Protocol) -> bytes:
    message = to_message(inference)
    if protocol is Protocol.GRPC_STREAM:
        message.parameters[EMPTY_FINAL].bool_param = True
    encoded: bytes = message.SerializeToString()
    return encoded


def _encode_http(inference: Inference, url: str, headers: Mapping[str, str]) -> bytes:
    contents = [content_of(tensor) for tensor in inference.inputs]
    header = json.dumps(request_header(inference, contents)).encode()
    return encode_post(
        url,
        f"{model_path(inference.model, inference.version)}/infer",
        b"".join([header, *contents]),
        {
            "Content-Type": "application/octet-stream",
            HEADER_LENGTH: str(len(header)),
            **headers,
        },
    )


def encode_post(url: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """Returns a request of HTTP/1.1."""
    parts = urlsplit(url)
    lines = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
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
        headers = {"Content-Type": "application/json", **headers}
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
