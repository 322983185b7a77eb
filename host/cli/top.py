"""`pbhost top`: shows what the models of a running server do, and updates it."""

from __future__ import annotations

import json
import math
import os
import select
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, TextIO

from host.cli.arguments import errors_end, parse_texts
from host.cli.server_client import ConnectionOptions, ServerClient
from host.logs.formats import escape_control_characters
from host.metrics.overview import ModelOverview, ServerOverview
from host.options.flags import SWITCH, FlagGroup, InvalidValue, one_of
from host.system.resources import format_bytes


@dataclass(frozen=True, slots=True)
class ModelRates:
    """What a version of a model did between two overviews.

    `requests` and `failures` are per second, `batch_size` is a mean, `p50_us` and `p99_us` are
    latencies in microseconds; these three are NaN without a request.
    """

    model: ModelOverview
    requests: float
    failures: float
    batch_size: float
    p50_us: float
    p99_us: float

    @property
    def serving(self) -> int:
        """The number of instances that take batches."""
        return sum(one.state == "serving" for one in self.model.instances)

    @property
    def restarts(self) -> int:
        """How often stubs of the model were restarted."""
        return sum(one.restarts for one in self.model.instances)

    @property
    def resident_bytes(self) -> int:
        """The memory of all instances."""
        return sum(one.resident_bytes for one in self.model.instances)


def compute_rates(before: ServerOverview | None, now: ServerOverview) -> list[ModelRates]:
    """The rates of each model; since its load if there is no earlier overview.

    A server that was restarted in between, or a model that was loaded, counts from its start.
    """
    earlier: dict[tuple[str, str, int], ModelOverview] = {}
    seconds = now.uptime_seconds
    if before is not None and before.uptime_seconds < now.uptime_seconds:
        earlier = {(one.namespace, one.name, one.version): one for one in before.models}
        seconds -= before.uptime_seconds
    return list(_model_rates(earlier, now.models, max(seconds, 1e-3)))


def _model_rates(
    earlier: dict[tuple[str, str, int], ModelOverview],
    models: Sequence[ModelOverview],
    seconds: float,
) -> Iterator[ModelRates]:
    for model in models:
        old = earlier.get((model.namespace, model.name, model.version))
        if old is None or old.success > model.success or old.executions > model.executions:
            old = ModelOverview(model.name, model.namespace, model.version, "", "")
        executions = model.executions - old.executions
        inferences = model.inferences - old.inferences
        counts = _new_latencies(old.latency, model.latency)
        yield ModelRates(
            model,
            requests=(model.success - old.success) / seconds,
            failures=max(0, model.failure - old.failure) / seconds,
            batch_size=inferences / executions if executions else math.nan,
            p50_us=quantile(counts, 0.50),
            p99_us=quantile(counts, 0.99),
        )


def _new_latencies(
    old: Sequence[tuple[float, int]], new: Sequence[tuple[float, int]]
) -> list[tuple[float, int]]:
    known = dict(old)
    return [(bound, count - known.get(bound, 0)) for bound, count in new]


def quantile(buckets: Sequence[tuple[float, int]], wanted: float) -> float:
    """The upper bound of the bucket with this quantile; NaN without a count."""
    rank = wanted * sum(count for _, count in buckets)
    below = 0
    for bound, count in buckets:
        below += count
        if count and below >= rank:
            return bound
    return math.nan


_ABOUT = """\
Shows the models of a running server in a table, and updates it until you press q or Ctrl-C. URL is
the address of the server's HTTP port, by default http://localhost:8000. Where the output is not a
terminal, tables follow each other.

columns:
  INST      instances that take batches, of all instances
  QUEUE     requests that wait for an execution
  BATCH     mean size of the batches
  REQ/S     requests that were answered, per second
  FAIL/S    requests that failed, per second
  P50, P99  latency: half of the requests, and 99 % of them, took no longer
  MEMORY    resident memory of all instances, with pages that they share
  RESTARTS  restarts of stub processes since the load

examples:
  pbhost top
  pbhost top http://localhost:8000 --once --sort=memory

exit status: 0 it was ended, or has printed one table; 1 the server does not answer; 2 the command
line is invalid"""

_SORT_KEYS: dict[str, Callable[[ModelRates], float]] = {
    "name": lambda row: 0.0,
    "rate": lambda row: -row.requests,
    "queue": lambda row: -row.model.pending,
    "p99": lambda row: 0.0 if math.isnan(row.p99_us) else -row.p99_us,
    "memory": lambda row: -row.resident_bytes,
    "restarts": lambda row: -row.restarts,
}
_DEFAULT_SIZE = os.terminal_size((500, 0))  # of what is not a terminal: no limit of lines
_LINES_FOR_WHOLE_HEAD = 12  # of a terminal; on a smaller one, models are more important
_SMALLEST_NAME = 12  # columns for the names of models, before other columns are left out

_group = FlagGroup("Top")


def _check_interval(seconds: float) -> None:
    if not 1 <= seconds <= 3600:
        raise InvalidValue(f"--interval: expected 1 to 3600 seconds, got {seconds:g}")


@dataclass
class TopOptions(ConnectionOptions):
    """The flags of `pbhost top`."""

    once: bool = _group(
        False, "Print one table of what happens during one interval, and exit.", SWITCH
    )
    interval: float = _group(2.0, "Seconds from one table to the next.", check=_check_interval)
    sort: str = _group(
        "name", f"Order of the models: {', '.join(_SORT_KEYS)}.", check=one_of("sort", *_SORT_KEYS)
    )
    model: str = _group("", "Show only models whose names contain this text.")
    format: str = _group(
        "text",
        "Output format: text, or json, which has one line for each table.",
        check=one_of("format", "text", "json"),
    )


@dataclass(frozen=True, slots=True)
class _Column:
    """A column; those with the lowest `weight` are left out first if the terminal is narrow."""

    title: str
    width: int
    weight: int
    text: Callable[[ModelRates], str]


def main(arguments: Sequence[str]) -> NoReturn:
    """Shows the models and exits."""
    (url,), options = parse_texts(arguments, "top [URL]", _ABOUT, TopOptions)
    with errors_end("top"):
        try:
            _show(ServerClient(url, options), options)
        except KeyboardInterrupt:
            pass
        except BrokenPipeError:  # the reader has enough; nothing more can be written at exit either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def _show(client: ServerClient, options: TopOptions) -> None:
    """Shows tables until the user has seen enough. Raises HostError."""
    if options.once:
        before = _read(client)
        time.sleep(options.interval)
        sys.stdout.write("\n".join(_describe(before, _read(client), options, _size())) + "\n")
    elif options.format == "text" and sys.stdin.isatty() and sys.stdout.isatty():
        with _full_screen(sys.stdin):
            _repeat(client, options, _paint, lambda: _wait_for_quit(options.interval))
    else:
        show = _print if options.format == "text" else _print_line
        _repeat(client, options, show, lambda: _pause(options.interval))


def _read(client: ServerClient) -> ServerOverview:
    return client.read("/v2/overview", ServerOverview)


def _repeat(
    client: ServerClient,
    options: TopOptions,
    show: Callable[[list[str]], None],
    wait: Callable[[], bool],
) -> None:
    """Shows tables until `wait` returns True."""
    before: ServerOverview | None = None
    while True:
        now = _read(client)
        show(_describe(before, now, options, _size()))
        before = now
        if wait():
            return


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _wait_for_quit(seconds: float) -> bool:
    """Waits; returns whether q was pressed."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            keys = os.read(sys.stdin.fileno(), 64)
            if not keys or b"q" in keys:  # nothing is read once the terminal has gone
                return True
    return False


def _print(lines: list[str]) -> None:
    sys.stdout.write("\n".join([*lines, "", ""]))
    sys.stdout.flush()


def _print_line(lines: list[str]) -> None:
    sys.stdout.write("\n".join([*lines, ""]))
    sys.stdout.flush()


def _paint(lines: list[str]) -> None:
    """Replaces the content of the screen.

    It is cleared first, as a full line leaves the cursor on its last character.
    """
    sys.stdout.write("\x1b[H\x1b[J" + "\n".join(lines) + "\x1b[H")
    sys.stdout.flush()


@contextmanager
def _full_screen(keyboard: TextIO) -> Iterator[None]:
    """Takes the whole terminal, and gives it back as it was."""
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    sys.stdout.write("\x1b[?1049h\x1b[?25l")  # the other screen, without a cursor
    try:
        yield
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _size() -> os.terminal_size:
    """The columns and lines of the terminal."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return _DEFAULT_SIZE
    return size if size.columns else _DEFAULT_SIZE  # in a container they may be 0


def _describe(
    before: ServerOverview | None, now: ServerOverview, options: TopOptions, size: os.terminal_size
) -> list[str]:
    """The lines of one table, at most as wide and as high as the terminal."""
    rows = [row for row in compute_rates(before, now) if options.model in row.model.name]
    rows.sort(key=lambda row: (_SORT_KEYS[options.sort](row), row.model.name, row.model.version))
    if options.format == "json":
        return [_to_json(now, rows)]
    head = (
        f"{now.name}, pbhost {now.version}: up {_format_duration(now.uptime_seconds)},"
        f" {len(rows)} model{'s' * (len(rows) != 1)},"
        f" {sum(row.requests for row in rows):.1f} requests/s,"
        f" {sum(row.model.pending for row in rows)} waiting, server process"
        f" {format_bytes(now.resident_bytes)}"
    )
    heads = textwrap.wrap(escape_control_characters(head), size.columns)
    if size.lines and size.lines < _LINES_FOR_WHOLE_HEAD:
        del heads[1:]
    lines = [*heads, *_format_rows(rows, size.columns)]
    if size.lines and len(lines) > size.lines:
        hidden = len(lines) - size.lines + 1
        lines[size.lines - 1 :] = [f"... and {hidden} more; --model and --sort select"]
    return [line[: size.columns] for line in lines]


def _to_json(now: ServerOverview, rows: Sequence[ModelRates]) -> str:
    """One table as a line of JSON; what is not known without a request is null."""

    def known(number: float) -> float | None:
        return None if math.isnan(number) else number

    models = [
        {
            "name": row.model.name,
            "namespace": row.model.namespace,
            "version": row.model.version,
            "state": row.model.state,
            "instances": len(row.model.instances),
            "serving": row.serving,
            "pending": row.model.pending,
            "batch_size": known(row.batch_size),
            "requests_per_second": row.requests,
            "failures_per_second": row.failures,
            "p50_us": known(row.p50_us),
            "p99_us": known(row.p99_us),
            "resident_bytes": row.resident_bytes,
            "restarts": row.restarts,
        }
        for row in rows
    ]
    server = {"name": now.name, "version": now.version, "uptime_seconds": now.uptime_seconds}
    return json.dumps({"server": server, "models": models})


def _format_rows(rows: Sequence[ModelRates], width: int) -> list[str]:
    """The title and a line for each model; columns that do not fit are left out."""
    columns = list(_COLUMNS)
    names = [_format_name(row) for row in rows]
    longest = max([len("MODEL"), *map(len, names)])
    least = min(longest, _SMALLEST_NAME)

    def left() -> int:
        return width - sum(column.width + 1 for column in columns)

    while columns and left() < least:
        columns.remove(min(columns, key=lambda column: column.weight))
    room = max(1, min(longest, left()))
    titles = " ".join(["MODEL".ljust(room), *(one.title.rjust(one.width) for one in columns)])
    lines = [titles]
    for row, name in zip(rows, names, strict=True):
        shown = _shorten(name, room)
        if not row.model.instances and row.model.state != "READY":
            state = f"{row.model.state} {row.model.reason}"
            lines.append(f"{shown.ljust(room)} {escape_control_characters(state)}".split("\n")[0])
            continue
        cells = (one.text(row).rjust(one.width) for one in columns)
        lines.append(" ".join([shown.ljust(room), *cells]))
    return lines


def _shorten(name: str, room: int) -> str:
    """A name without its middle if it is too long: names differ at their ends, too."""
    if len(name) <= room:
        return name
    tail = (room - 1) // 2
    return f"{name[: room - 1 - tail]}+{name[len(name) - tail :]}"


def _format_name(row: ModelRates) -> str:
    model = row.model
    name = f"{model.namespace}/{model.name}" if model.namespace else model.name
    return escape_control_characters(f"{name}:{model.version}" if model.version else name)


def _format_rate(rate: float) -> str:
    return f"{rate:.1f}" if rate < 1000 else f"{rate:.0f}"


def _format_latency(microseconds: float) -> str:
    if math.isnan(microseconds):
        return "-"
    if microseconds < 1000:
        return f"{microseconds:.0f}us"
    if microseconds < 1_000_000:
        return f"{microseconds / 1000:.{1 if microseconds < 100_000 else 0}f}ms"
    return f"{microseconds / 1_000_000:.1f}s"


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d " * bool(days) + f"{hours}:{minutes:02}:{rest:02}"


_COLUMNS = (
    _Column("INST", 5, 5, lambda row: f"{row.serving}/{len(row.model.instances)}"),
    _Column("QUEUE", 5, 6, lambda row: str(row.model.pending)),
    _Column(
        "BATCH", 5, 1, lambda row: "-" if math.isnan(row.batch_size) else f"{row.batch_size:.1f}"
    ),
    _Column("REQ/S", 7, 8, lambda row: _format_rate(row.requests)),
    _Column("FAIL/S", 6, 3, lambda row: _format_rate(row.failures)),
    _Column("P50", 6, 4, lambda row: _format_latency(row.p50_us)),
    _Column("P99", 6, 7, lambda row: _format_latency(row.p99_us)),
    _Column("MEMORY", 6, 2, lambda row: format_bytes(row.resident_bytes)),
    _Column("RESTARTS", 8, 0, lambda row: str(row.restarts)),
)
