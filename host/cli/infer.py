"""`pbhost infer`: sends one request to a running server."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from host.cli.arguments import (
    EXIT_FAILED,
    EXIT_USAGE,
    INPUT_VALUES,
    check_positive,
    errors_end,
    fail,
    input_flag,
    parse_texts,
    split_inputs,
    version_flag,
)
from host.cli.model_client import ModelClient
from host.cli.server_client import ConnectionOptions
from host.client.messages import add_input, new_request
from host.client.signature import encode_tensor
from host.inference.request import Parameter
from host.options.flags import FlagGroup, InvalidValue
from pb_utils import Tensor
from pb_utils._text_form import InvalidInput, format_response, read_inputs

URL = re.compile(r"(https?|grpcs?)://[^/]+/?")

_ABOUT = f"""\
Sends one request to a model of a running server and prints the responses. URL is the address of
the server's HTTP port (http://HOST:PORT, or https) or gRPC port (grpc://HOST:PORT, or grpcs), by
default http://localhost:8000. The responses of a decoupled model are printed as they arrive; they
need the gRPC port.

{INPUT_VALUES.format("the server")}

examples:
  pbhost infer add_sub --input 'INPUT0=[1, 2, 3, 4]' --input INPUT1=random
  pbhost infer grpc://localhost:8001 repeat --input IN=hello --parameter 'max_tokens=20'
  pbhost infer http://localhost:8000 classify --input IMAGE=@cat.png --header 'api-key: secret'
  pbhost infer http://localhost:8000 sum --input X=1 --parameter sequence_id=7 \\
    --parameter sequence_start=true

exit status: 0 all responses are successful; 1 a response is an error, or the server does not
answer; 2 the command line is invalid, or the inputs do not match the model"""


def read_parameters(texts: Sequence[str]) -> dict[str, Parameter]:
    """Returns the parameters by name. Raises InvalidValue."""
    parameters: dict[str, Parameter] = {}
    for text in texts:
        name, equals, written = text.partition("=")
        if not name or not equals:
            raise InvalidValue(f"expected NAME=VALUE, got '{text}'")
        try:
            value: Any = json.loads(written)
        except ValueError:
            value = written
        if not isinstance(value, (bool, int, float, str)):
            raise InvalidValue(f"expected true, false, a number or a text, got '{written}'")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise InvalidValue(f"expected a number of 64 bits, got '{written}'")
        parameters[name] = value
    return parameters


_group = FlagGroup("Request")


@dataclass
class InferOptions(ConnectionOptions):
    """The flags of `pbhost infer`."""

    input: list[str] = input_flag(_group)
    output: list[str] = _group(
        [], "Name of a requested output; by default all. You can repeat this flag."
    )
    version: int | None = version_flag(_group)
    request_id: str = _group("", "Id of the request, for logs and traces.")
    parameter: list[str] = _group(
        [],
        "Parameter of the request, as NAME=VALUE: true, false, a number, or a text. You can repeat"
        " this flag.",
        check=read_parameters,
    )
    timeout: float = _group(60.0, "Seconds to wait for the responses.", check=check_positive)


def main(arguments: Sequence[str]) -> NoReturn:
    """Prints the responses and exits."""
    (url, model), options = parse_texts(arguments, "infer [URL] MODEL", _ABOUT, InferOptions)
    if not URL.fullmatch(url):
        fail("infer", f"expected http://HOST:PORT or grpc://HOST:PORT, got '{url}'", EXIT_USAGE)
    with (
        errors_end("infer", InvalidInput),
        ModelClient(url, options, options.timeout) as client,
    ):
        failed = _infer(client, model, options)
    sys.exit(EXIT_FAILED if failed else 0)


def _infer(client: ModelClient, model: str, options: InferOptions) -> bool:
    """Sends the request and prints the responses; returns whether one of them is an error.

    Raises HostError and InvalidInput.
    """
    version = "" if options.version is None else str(options.version)
    config = client.read_config(model, version)
    values = read_inputs(split_inputs(options.input), config)
    parameters = read_parameters(options.parameter)
    request = new_request(model, version, options.request_id, options.output, parameters)
    for name, value in values.items():
        tensor = value if isinstance(value, Tensor) else Tensor(name, value)
        add_input(request, encode_tensor(tensor))
    decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
    count, failed = 0, False
    started = time.perf_counter()
    for response in client.infer(request, decoupled):
        count += 1
        error = response.error()
        if error is None:
            sys.stdout.write(f"{format_response(count, response)}\n")
            sys.stdout.flush()  # the next response of a stream may arrive much later
        else:
            failed = True
            sys.stderr.write(f"response {count}: error: {error.message()}\n")
    if not count:
        sys.stdout.write("no response\n")
    if not failed:
        sys.stdout.write(f"done in {1000 * (time.perf_counter() - started):.3f} ms\n")
    return failed
