"""`pbhost bench`: sends load to a model of a running server, and measures its responses."""

from __future__ import annotations

import math
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from host.cli.arguments import (
    EXIT_FAILED,
    EXIT_USAGE,
    check_inputs,
    errors_end,
    fail,
    parse_texts,
    split_inputs,
    version_flag,
)
from host.cli.bench_reports import REPORTS, format_milliseconds
from host.cli.infer import URL, read_parameters
from host.cli.model_client import ModelClient, with_port
from host.cli.server_client import ConnectionOptions, ServerClient, read_headers
from host.errors import HostError, invalid_argument, unsupported
from host.load_generator.job import Protocol, Target
from host.load_generator.measurement import (
    Level,
    Load,
    Measurement,
    Measuring,
    Plan,
    Progress,
    ServerCounts,
    quantile,
)
from host.load_generator.requests import (
    Inputs,
    Prompts,
    encode_chains,
    make_inferences,
    make_sequence,
    make_target,
    sequence_step,
)
from host.load_generator.workers import Workers
from host.options.flags import SWITCH, FlagGroup, InvalidValue, integer, one_of
from pb_utils._text_form import InvalidInput

_ABOUT = """\
Sends requests to a model of a running server, and prints rates and latencies. URL is the address of
the server's HTTP port (http://HOST:PORT, or https) or gRPC port (grpc://HOST:PORT, or grpcs), by
default http://localhost:8000. Any server of this protocol will do, Triton too.

--concurrency keeps that many requests in flight (closed loop). --rate sends requests at times of
their own, whatever the server does (open loop); latencies then count from the time at which a
request was due, so that a server that stalls cannot hide it. Both take a number, a list, or
START:END:STEP. After a warm-up, windows are measured until three that follow each other differ by
less than --stability in rate and mean latency; these three are reported.

Inputs are random by default; --shape gives variable dimensions their sizes, without the batch.
--input-data reads the JSON files of perf_analyzer, or a folder with a file for each input.
--recording sends the requests of a folder that pbhost record wrote. Requests to decoupled models,
and those with --streaming, use streams of the gRPC port. With --api, requests are sent to /v1.

examples:
  pbhost bench add_sub --concurrency=1,4,16
  pbhost bench grpc://localhost:8001 resnet --shape=IMAGE:3,224,224 --rate=50:200:50
  pbhost bench grpc://localhost:8001 repeat --input 'IN=[3]' --concurrency=8
  pbhost bench llama --api=chat --max-tokens=100 --concurrency=8 --format=json

exit status: 0 all requests were successful; 1 a request has failed, the server does not answer, or
Ctrl-C ended it, after printing what was measured; 2 the command line is invalid, or the inputs do
not match the model"""

_MOST_LEVELS = 1000
_MOST_ID = 1 << 30  # of a sequence: models may read it as INT32
_PROMPT = "Tell me a story about a lighthouse keeper and a storm."


def _read_levels(text: str) -> list[float]:
    """Reads a number, a list, or START:END:STEP. Raises InvalidValue."""
    expected = InvalidValue(f"expected a number, a list, or START:END:STEP; got '{text}'")
    try:
        if ":" not in text:
            levels = [float(part) for part in text.split(",")]
        else:
            start, end, *rest = (float(part) for part in text.split(":"))
            step = rest[0] if rest else 1.0
            if len(rest) > 1 or not step > 0 or not math.isfinite(step + end):
                raise expected
            count = int((end - start) / step + 1e-9) + 1
            levels = [start + number * step for number in range(min(count, _MOST_LEVELS + 1))]
    except (ValueError, OverflowError):
        raise expected from None
    if not levels or not all(0 < level < math.inf for level in levels):
        raise expected
    if len(levels) > _MOST_LEVELS:
        raise InvalidValue(f"expected at most {_MOST_LEVELS} levels")
    return levels


_ALONE = {
    "input_data": ("input", "zero_input", "string_length", "recording", "prompt"),
    "recording": ("input", "shape", "batch_size", "zero_input", "string_length"),
    "api": (
        *("input", "shape", "batch_size", "zero_input", "string_length", "recording"),
        *("sequence_length", "parameter", "version", "streaming"),
    ),
    "prompt": ("input", "recording"),
    "zero_input": ("string_length",),
    "concurrency": ("rate", "distribution", "seed"),
    "requests": ("window", "windows", "stability"),
}
"""Flags that other ones make useless."""

_NEEDED = {"api": ("prompt", "max_tokens", "stream"), "rate": ("distribution", "seed")}
"""Flags without which other ones are useless."""


def check_together(options: Any) -> None:
    """Raises InvalidInput for flags of bench or tune that would have no effect."""
    default = type(options)()

    def is_given(name: str) -> bool:
        return bool(getattr(options, name, None) != getattr(default, name, None))

    for name, others in _ALONE.items():
        for other in others:
            if is_given(name) and is_given(other):
                one, two = (f"--{flag.replace('_', '-')}" for flag in (name, other))
                raise InvalidInput(f"give either {one} or {two}: {two} has no effect with {one}")
    for needed, names in _NEEDED.items():
        for name in names:
            if is_given(name) and not is_given(needed):
                raise InvalidInput(f"--{name.replace('_', '-')} needs --{needed}")


def _check_rate(text: str) -> None:
    if text:
        _read_levels(text)


def _check_concurrency(text: str) -> None:
    if text and any(level % 1 or level > 10_000 for level in _read_levels(text)):
        raise InvalidValue(f"expected whole numbers up to 10000, got '{text}'")


_SHAPE = re.compile(r"(.+):([0-9]+(?:,[0-9]+)*)")


def read_shapes(texts: Sequence[str]) -> dict[str, list[int]]:
    """Returns the dimensions by name. Raises InvalidValue."""
    shapes = {}
    for text in texts:
        found = _SHAPE.fullmatch(text)
        if found is None:
            raise InvalidValue(f"expected NAME:SIZE,SIZE,... such as IMAGE:3,224,224; got '{text}'")
        shapes[found[1]] = [int(size) for size in found[2].split(",")]
    return shapes


def _between(low: float, high: float) -> Callable[[float], None]:
    def check(value: float) -> None:
        if not low <= value <= high:
            raise InvalidValue(f"expected a number from {low:g} to {high:g}, got {value:g}")

    return check


_load = FlagGroup("Load")
_requests = FlagGroup("Requests")
_measuring = FlagGroup("Measuring")


@dataclass
class BenchOptions(ConnectionOptions):
    """The flags of `pbhost bench`."""

    concurrency: str = _load(
        "", "Requests in flight; by default 1, without --rate.", check=_check_concurrency
    )
    rate: str = _load("", "Requests per second, in open loop.", check=_check_rate)
    distribution: str = _load(
        "poisson",
        "Times of requests with --rate: poisson, or constant.",
        check=one_of("distribution", "poisson", "constant"),
    )
    streaming: bool = _load(
        False, "Send requests on streams, also to a model that is not decoupled.", SWITCH
    )
    processes: int = _load(
        0, "Processes that send; 0: one, and more while one is the limit.", integer(0, 256)
    )
    input: list[str] = _requests(
        [],
        "Input, as NAME=VALUE, with the values of pbhost infer. You can repeat this flag.",
        check=check_inputs,
    )
    shape: list[str] = _requests(
        [],
        "Dimensions of an input, as NAME:SIZE,SIZE,... without the batch. You can repeat this"
        " flag.",
        check=read_shapes,
    )
    batch_size: int = _requests(1, "Batch of each request.", integer(1))
    zero_input: bool = _requests(False, "Send zeros and empty texts instead of random.", SWITCH)
    string_length: int = _requests(
        0, "Length of random texts; 0: a few characters.", integer(0, 1 << 24)
    )
    input_data: str = _requests("", "File or folder with the inputs of requests, sent in turn.")
    recording: str = _requests("", "Folder of pbhost record, whose requests are sent in turn.")
    sequence_length: int = _requests(
        20, "Requests of a sequence, for models with a sequence batcher.", integer(1, 1 << 20)
    )
    parameter: list[str] = _requests(
        [],
        "Parameter of the requests, as NAME=VALUE: true, false, a number, or a text. You can"
        " repeat this flag.",
        check=read_parameters,
    )
    version: int | None = version_flag(_requests)
    api: str = _requests(
        "infer",
        "API: infer, or one of /v1: chat, completions, embeddings.",
        check=one_of("api", "infer", "chat", "completions", "embeddings"),
    )
    prompt: list[str] = _requests(
        [], "Text of requests to /v1; you can repeat this flag to send several in turn."
    )
    max_tokens: int = _requests(0, "Tokens of a response of /v1 at most; 0: no limit.", integer(0))
    stream: bool = _requests(True, "Whether chat and completions are streamed.")
    timeout: float = _requests(
        60.0, "Seconds until the last response to a request.", check=_between(0.001, 1e6)
    )
    warmup: float = _measuring(1.0, "Seconds before measuring.", check=_between(0, 3600))
    window: float = _measuring(2.0, "Seconds of a window.", check=_between(0.05, 3600))
    windows: int = _measuring(10, "Windows at most.", integer(1, 1000))
    stability: float = _measuring(
        0.1, "Share by which three windows may differ.", check=_between(0.001, 10)
    )
    requests: int = _measuring(
        0, "Measure this number of requests instead of windows; 0: windows.", integer(0)
    )
    seed: int = _measuring(0, "Start of the random times of --distribution=poisson.", integer(0))
    format: str = _measuring(
        "text", "Output format: text, csv or json.", check=one_of("format", "text", "csv", "json")
    )


def main(arguments: Sequence[str]) -> NoReturn:
    """Measures, prints a report, and exits."""
    (url, model), options = parse_texts(arguments, "bench [URL] MODEL", _ABOUT, BenchOptions)
    if not URL.fullmatch(url):
        fail("bench", f"expected http://HOST:PORT or grpc://HOST:PORT, got '{url}'", EXIT_USAGE)
    with errors_end("bench", InvalidInput, one_line=True):
        check_together(options)
        url = with_port(url.rstrip("/"))
        with ModelClient(url, options, options.timeout) as client:
            measured = _Bench(url, model, options, client).run()
    if not measured:
        fail("bench", "interrupted before anything was measured")
    failed = any(one.failed or one.interrupted or not one.sample.latencies for one in measured)
    sys.exit(EXIT_FAILED if failed else 0)


def _note_interrupt() -> Callable[[], bool]:
    """Returns whether Ctrl-C was pressed; the second time it raises KeyboardInterrupt."""
    pressed: list[int] = []

    def press(number: int, _: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    signal.signal(signal.SIGINT, press)
    return lambda: bool(pressed)


class _Bench:
    """Measures all levels."""

    def __init__(self, url: str, model: str, options: BenchOptions, client: ModelClient) -> None:
        self._url, self._model, self._options, self._client = url, model, options, client
        self._version = "" if options.version is None else str(options.version)
        self._headers = read_headers(options.header)
        self._first_id = random.randrange(1, _MOST_ID)

    def run(self) -> list[Measurement]:
        """Prints a line for each level. Raises HostError and InvalidInput."""
        options = self._options
        plan = Plan(
            options.window, options.windows, options.stability, options.warmup, options.requests,
            options.processes, options.timeout, options.seed,
        )  # fmt: skip
        levels = self._levels()
        make_load, protocol = self._prepare()
        report = REPORTS[options.format](self._model, protocol, plan)
        interrupt = _note_interrupt()
        live = _LiveLine()
        measured: list[Measurement] = []
        try:
            with Workers() as workers:
                measuring = Measuring(workers, plan, live.show, self._read_counts(), interrupt)
                for level in levels:
                    found = measuring.measure(make_load(level), level)
                    live.clear()
                    if found.interrupted and not found.sample.seconds:
                        break
                    measured.append(found)
                    report.add(found)
                    if found.interrupted:
                        break
        finally:
            live.clear()
            if measured:
                report.finish()
        return measured

    def _levels(self) -> list[Level]:
        options = self._options
        if options.rate:
            poisson = options.distribution == "poisson"
            return [Level(rate=rate, poisson=poisson) for rate in _read_levels(options.rate)]
        return [Level(int(number)) for number in _read_levels(options.concurrency or "1")]

    def _prepare(self) -> tuple[Callable[[Level], Load], Protocol]:
        """Returns the load of a level, after one request has shown that it works."""
        if self._options.api != "infer":
            return self._prepare_v1()
        config = self._client.read_config(self._model, self._version)
        options = self._options
        decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        http = not self._url.startswith("grpc")
        if http and (decoupled or options.streaming):
            raise unsupported(
                f"model '{self._model}' is decoupled: HTTP has no streams of tensors; use the"
                " address of the gRPC port, grpc://HOST:PORT"
                if decoupled
                else "--streaming needs the address of the gRPC port, grpc://HOST:PORT"
            )
        protocol = Protocol.HTTP if http else Protocol.GRPC
        if decoupled or options.streaming:
            protocol = Protocol.GRPC_STREAM
        inputs = Inputs(
            split_inputs(options.input), read_shapes(options.shape), options.batch_size,
            options.zero_input, options.string_length, options.input_data, options.recording,
            read_parameters(options.parameter),
        )  # fmt: skip
        inferences = make_inferences(config, self._model, self._version, inputs)
        target = self._target(protocol)
        if "sequence_batching" in config and "sequence_id" not in inputs.parameters:
            return self._make_sequence_load(target, inferences, protocol), protocol
        if options.sequence_length != BenchOptions.sequence_length:
            raise InvalidInput(
                f"--sequence-length has no effect: model '{self._model}' has no sequence batcher"
                if "sequence_batching" not in config
                else "--sequence-length has no effect with --parameter=sequence_id"
            )
        self._client.try_request(inferences[0], protocol is Protocol.GRPC_STREAM)
        load = Load(target, self._encode([inferences], protocol))
        return lambda level: load, protocol

    def _target(self, protocol: Protocol) -> Target:
        certificates = self._options.ca_file, self._options.certificate_file, self._options.key_file
        return make_target(self._url, protocol, self._headers, certificates)

    def _encode(self, chains: Iterable[Iterable[Any]], protocol: Protocol) -> list[list[bytes]]:
        return encode_chains(chains, self._url, protocol, self._headers)

    def _make_sequence_load(
        self, target: Target, inferences: Sequence[Any], protocol: Protocol
    ) -> Callable[[Level], Load]:
        length = self._options.sequence_length
        if self._options.rate:
            raise unsupported(
                f"model '{self._model}' has a sequence batcher: its requests follow each other, so"
                " use --concurrency, which is the number of sequences"
            )
        whole = sequence_step(inferences[0], self._first_id, True, True)
        self._client.try_request(whole, protocol is Protocol.GRPC_STREAM)

        def make_load(level: Level) -> Load:
            ids = range(self._first_id, self._first_id + level.concurrency)
            # Each request is made when it is encoded: it has copies of the tensors.
            sequences = (make_sequence(inferences, length, number) for number in ids)
            ends = (sequence_step(inferences[0], number, False, True) for number in ids)
            *chains, ends_encoded = self._encode([*sequences, ends], protocol)
            return Load(target, chains, ends_encoded)

        return make_load

    def _prepare_v1(self) -> tuple[Callable[[Level], Load], Protocol]:
        options = self._options
        if self._url.startswith("grpc"):
            raise invalid_argument("--api needs the address of the HTTP port, http://HOST:PORT")
        prompts = Prompts(
            options.api, self._model, options.prompt or [_PROMPT], options.max_tokens,
            options.stream, options.input_data,
        )  # fmt: skip
        chain = prompts.encode(self._url, self._headers)
        body = chain[0].partition(b"\r\n\r\n")[2]
        client = ServerClient(self._url, options, options.timeout)
        try:
            client.post(prompts.path, body, {"Content-Type": "application/json"})
        except HostError as error:
            raise HostError(error.code, f"{prompts.path}: {error.message}") from error
        load = Load(self._target(prompts.protocol), [chain])
        return lambda level: load, prompts.protocol

    def _read_counts(self) -> Callable[[], ServerCounts | None]:
        """Reads the statistics of the model, until the server refuses to show them."""
        refused = False

        def read() -> ServerCounts | None:
            nonlocal refused
            if not refused:
                try:
                    return ServerCounts.of(self._client.read_statistics(self._model, self._version))
                except HostError:
                    refused = True  # as to a client that may only infer
            return None

        return read


class _LiveLine:
    """A line on stderr that is replaced while a level is measured, if it is a terminal."""

    def __init__(self) -> None:
        self._active = sys.stderr.isatty()

    def show(self, progress: Progress) -> None:
        if not self._active:
            return
        sample = progress.sample
        rate = sample.rate
        text = f"{progress.level}, {progress.phase}: {rate:.0f} requests/s"
        if sample.latencies:
            text += (
                f", p50 {format_milliseconds(quantile(sample.latencies, 0.5))} ms"
                f", p99 {format_milliseconds(quantile(sample.latencies, 0.99))} ms"
            )
        failed = sum(sample.failures.values())
        text += f", {failed} failed" * bool(failed)
        text += f", {sample.backlog} waiting to be sent" * bool(sample.backlog)
        sys.stderr.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._active:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
