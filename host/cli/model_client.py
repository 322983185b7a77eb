"""Asks the models of a running server, over gRPC or HTTP, for subcommands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from host.cli.server_client import ConnectionOptions, read_headers
from host.client.blocking import open_transport
from host.client.channel import NoAnswer, Rpc, read_settings
from host.client.grpc_transport import GrpcTransport
from host.client.messages import (
    EMPTY_FINAL,
    UNKNOWN_MODEL,
    parameter_values,
    take_final,
    unfit_request,
)
from host.client.signature import to_tensor
from host.config.json_form import to_dict
from host.errors import ErrorCode, HostError, internal, invalid_argument, unsupported
from pb_utils import InferenceResponse, Tensor, TritonError


def with_port(url: str) -> str:
    """Returns an address with the default port of its scheme, if it has none."""
    if re.search(r":[0-9]+$", url):
        return url
    return f"{url}:80" if url.startswith("http:") else f"{url}:443"


class ModelClient:
    """Asks a running server. `timeout`: seconds until the last response of a call."""

    def __init__(self, url: str, options: ConnectionOptions, timeout: float) -> None:
        """Raises InvalidValue, and HostError for an address or files that cannot be used."""
        options.check_certificates(url)
        self._url = url.rstrip("/")
        self._settings = read_settings(
            with_port(self._url), "", read_headers(options.header),
            options.ca_file, options.certificate_file, options.key_file, "none",
        )  # fmt: skip
        self._transport = open_transport(self._settings)
        self._timeout = timeout

    def read_config(self, model: str, version: str) -> dict[str, Any]:
        """Returns the inputs of a model in the form of its configuration. Raises HostError.

        A model that loads on demand is loaded by a request that it refuses.
        """
        try:
            return self._read_config(model, version)
        except HostError as error:
            if not error.message.startswith(UNKNOWN_MODEL):
                raise
            refusal = error
        try:
            self._call("ModelInfer", unfit_request(model, version))
        except HostError as error:
            refusal = error
        try:
            return self._read_config(model, version)
        except HostError:
            raise refusal from None

    def _read_config(self, model: str, version: str) -> dict[str, Any]:
        """As `read_config`. A server that shows no configurations shows metadata."""
        try:
            request = pb.ModelConfigRequest(name=model, version=version)
            config = to_dict(self._call("ModelConfig", request).config)
        except NoAnswer:
            raise
        except HostError:
            described = pb.ModelMetadataRequest(name=model, version=version)
            config = _to_config(self._call("ModelMetadata", described))
        for entry in config["input"]:
            entry.pop("reshape", None)  # the server applies it: the client sends the shape before
        return config

    def read_statistics(self, model: str, version: str) -> dict[str, Any]:
        """Returns the statistics of a model, as JSON has them. Raises HostError."""
        request = pb.ModelStatisticsRequest(name=model, version=version)
        return to_dict(self._call("ModelStatistics", request))

    def infer(self, request: Any, decoupled: bool) -> Iterator[InferenceResponse]:
        """Sends a request and yields its responses, each with outputs or an error.

        Raises HostError.
        """
        if not decoupled:
            yield _to_response(self._call("ModelInfer", request))
            return
        if not isinstance(self._transport, GrpcTransport):
            raise unsupported(
                f"model '{request.model_name}' is decoupled: HTTP has no streams of tensors; use"
                " the address of the gRPC port, grpc://HOST:PORT"
            )
        request.parameters[EMPTY_FINAL].bool_param = True
        try:
            for answer in self._transport.open_stream(self._rpc("ModelStreamInfer", request)):
                if answer.error_message:
                    yield response_of([], {}, answer.error_message)
                    continue
                response = answer.infer_response
                final = take_final(response)
                if not final or response.outputs:
                    yield _to_response(response)
                if final:
                    return
        except NoAnswer as error:
            raise self._no_answer(error) from error

    def try_request(self, request: Any, decoupled: bool) -> None:
        """Sends a request whose responses are dropped. Raises HostError with the first error."""
        for response in self.infer(request, decoupled):
            error = response.error()
            if error is not None:
                raise invalid_argument(error.message())

    def close(self) -> None:
        """Closes the connections."""
        self._transport.close()

    def __enter__(self) -> ModelClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, method: str, message: Any) -> Any:
        try:
            return self._transport.call(self._rpc(method, message))
        except NoAnswer as error:
            raise self._no_answer(error) from error

    def _rpc(self, method: str, message: Any) -> Rpc:
        in_sequence = method == "ModelInfer" and "sequence_id" in message.parameters
        return Rpc(method, message, self._timeout, self._settings.metadata, not in_sequence)

    def _no_answer(self, error: NoAnswer) -> NoAnswer:
        text = f"no answer from {self._url}: {error.reason}"
        if self._settings.over_http or error.code is ErrorCode.UNAVAILABLE:
            protocol = "HTTP" if self._settings.over_http else "gRPC"
            text += f"; is it the address of the {protocol} port?"
        return NoAnswer(error.code, text, error.reason)


def _to_config(metadata: Any) -> dict[str, Any]:
    """Returns the part of a configuration that metadata give."""
    inputs = [
        {
            "name": entry.name,
            "data_type": f"TYPE_{'STRING' if entry.datatype == 'BYTES' else entry.datatype}",
            "dims": list(entry.shape),
            "optional": True,  # metadata do not say; the server refuses a request that lacks one
        }
        for entry in metadata.inputs
    ]
    return {"input": inputs, "max_batch_size": 0}


def _to_response(message: Any) -> InferenceResponse:
    if len(message.outputs) != len(message.raw_output_contents):
        raise internal("the server sent outputs that are not in raw form")
    outputs = [
        to_tensor(output.name, output.datatype, output.shape, content)
        for output, content in zip(message.outputs, message.raw_output_contents, strict=True)
    ]
    return response_of(outputs, parameter_values(message.parameters))


def response_of(
    outputs: Sequence[Tensor], parameters: Mapping[str, object], error: str = ""
) -> InferenceResponse:
    """Returns a response as a model would receive it."""
    failed = TritonError(error) if error else None
    return InferenceResponse._from_wire(list(outputs), failed, parameters)
