"""`pbhost replay`: sends recorded requests again, and compares the responses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from host.cli.arguments import parse_texts, serve_flag
from host.cli.comparison import Tolerance
from host.cli.grpc_inference import GrpcInferenceClient
from host.cli.http_inference import HttpInferenceClient
from host.cli.infer import URL
from host.cli.inference import InferenceClient
from host.cli.replaying import Replay, ReplayResult, Schedule
from host.cli.run import run_recorded
from host.cli.server_client import HEADER_HELP, check_headers
from host.errors import HostError, not_found
from host.logs.formats import escape_control_characters
from host.options.flags import SWITCH, FlagGroup, InvalidValue, integer, one_of
from host.options.validators import not_negative
from host.recording.folder import RecordingReader
from host.recording.format import RecordedRequest

_AS_FAST_AS_POSSIBLE = "max"

_ABOUT = """\
Sends the requests of a recording to a running server again, and compares the responses with those
of the recording; or runs one of them in this process, as `pbhost run` does. DIRECTORY was written
by `pbhost record`, or by a server with --crash-tensor-byte-size.

Errors are equal to errors, whatever their texts. Parameters of responses are not compared, nor are
outputs that were in shared memory of a client.

examples:
  pbhost replay out/ --against=http://localhost:8000
  pbhost replay out/ --against=grpc://localhost:8001 --speed=max --tolerance=0.001
  pbhost replay out/ --run models/resnet --request=17

exit status: 0 all responses are equal; 1 a response differs, the server does not answer, or the
recording cannot be read; 2 the command line is invalid"""


def _check_speed(text: str) -> None:
    _read_speed(text)


def _read_speed(text: str) -> float:
    """Returns how many times as fast as the original; 0 is as fast as possible."""
    if text == _AS_FAST_AS_POSSIBLE:
        return 0.0
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise InvalidValue(f"expected a number greater than 0, or max; got '{text}'")
    return speed


def _check_url(text: str) -> None:
    if text and not URL.fullmatch(text):
        raise InvalidValue(f"expected http://HOST:PORT or grpc://HOST:PORT, got '{text}'")


def _check_timeout(seconds: float) -> None:
    if seconds <= 0:
        raise InvalidValue(f"expected a number greater than 0, got {seconds:g}")


_group = FlagGroup("Replay")


@dataclass
class ReplayOptions:
    """The flags of `pbhost replay`."""

    against: str = _group(
        "",
        "Address of the server: http://HOST:PORT, or grpc://HOST:PORT, which decoupled models need;"
        " or https, or grpcs.",
        check=_check_url,
    )
    run: str = _group("", "Directory of the model that runs one request in this process.")
    request: int = _group(1, "Number of the request that --run runs.", integer(1))
    pdb: bool = _group(
        False, "With --run: open the debugger where the model raises an exception.", SWITCH
    )
    speed: str = _group(
        "1",
        "Speed of sending, as a multiple of the recorded speed; max: as fast as possible.",
        check=_check_speed,
    )
    concurrency: int = _group(
        32, "Number of requests that run at the same time, at most.", integer(1, 1024)
    )
    model: str = _group("", "Send the requests to this model instead.")
    version: str = _group("", "Send the requests to this version of the model instead.")
    tolerance: float = _group(
        1e-5, "Relative difference of floats that count as equal.", check=not_negative
    )
    absolute_tolerance: float = _group(
        1e-8, "Absolute difference of floats that count as equal.", check=not_negative
    )
    header: list[str] = _group([], HEADER_HELP, check=check_headers)
    timeout: float = _group(
        60.0, "Seconds to wait for the responses to a request.", check=_check_timeout
    )
    format: str = _group(
        "text", "Output format: text or json.", check=one_of("format", "text", "json")
    )
    backend_directory: str = serve_flag("backend_directory")


def main(arguments: Sequence[str]) -> NoReturn:
    """Replays the recording and exits."""
    (directory,), options = parse_texts(arguments, "replay DIRECTORY", _ABOUT, ReplayOptions)
    if bool(options.against) == bool(options.run):
        sys.stderr.write("pbhost replay: give either --against=URL or --run=MODEL_DIR\n")
        sys.exit(2)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # odd names
    try:
        with RecordingReader(Path(directory)) as reader:
            if options.run:
                request = _find_request(reader, options.request)
                run_recorded(
                    Path(options.run), reader, request, options.pdb, options.backend_directory
                )
            result = _send(reader, options)
    except HostError as error:
        sys.stderr.write(f"pbhost replay: {escape_control_characters(error.message)}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(1)
    sys.stdout.write(_describe(result, options.format))
    sys.exit(1 if result.differences or result.failed else 0)


def _find_request(reader: RecordingReader, number: int) -> RecordedRequest:
    """Returns a request by its number, from 1. Raises HostError."""
    count = 0
    for count, request in enumerate(reader.requests(), 1):
        if count == number:
            return request
    raise not_found(f"the recording has {count} requests, and no request {number}")


def _send(reader: RecordingReader, options: ReplayOptions) -> ReplayResult:
    """Raises HostError."""
    connect = GrpcInferenceClient if options.against.startswith("grpc") else HttpInferenceClient
    client: InferenceClient = connect(options.against, options.header, options.timeout)
    schedule = Schedule(_read_speed(options.speed), options.concurrency)
    tolerance = Tolerance(options.tolerance, options.absolute_tolerance)
    return Replay(reader, client, tolerance, options.model, options.version).run(schedule)


def _describe(result: ReplayResult, form: str) -> str:
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
    lines = [
        f"request {one.number} to '{one.model}' (id '{one.id}'): {one.text}"
        for one in result.differences
    ]
    more = result.different + result.failed - len(lines)
    if more > 0:
        lines.append(f"and {more} more")
    counts = f"{result.equal} equal, {result.different} different, {result.failed} failed"
    if result.not_compared:
        counts += f", {result.not_compared} without recorded responses"
    lines.append(f"{result.requests} requests in {result.seconds:.3f} s: {counts}")
    for name, latency in (("recorded", result.recorded), ("now", result.now)):
        if latency is not None:
            lines.append(
                f"latency {name}: p50 {1000 * latency.p50:.3f} ms, p99 {1000 * latency.p99:.3f} ms"
            )
    if result.largest_delay >= 0.1:
        lines.append(
            f"requests were up to {result.largest_delay:.3f} s late; raise --concurrency, or lower"
            " --speed"
        )
    return "".join(f"{escape_control_characters(line)}\n" for line in lines)
