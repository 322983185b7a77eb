"""`pbhost tune`: finds instances and batching for a model by measuring it."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from host.cli.arguments import (
    EXIT_FAILED,
    EXIT_USAGE,
    check_inputs,
    errors_end,
    fail,
    parse_texts,
    split_inputs,
)
from host.cli.bench import check_together, read_shapes
from host.cli.bench_reports import format_milliseconds, format_rate
from host.cli.infer import read_parameters
from host.cli.model_arguments import is_model, reject_repository, serve_flag
from host.errors import invalid_argument
from host.load_generator.job import Protocol
from host.load_generator.measurement import Load
from host.load_generator.requests import Inputs, encode_chains, make_inferences, make_target
from host.load_generator.workers import Workers
from host.logs.formats import escape_control_characters
from host.options.flags import SWITCH, FlagGroup, InvalidValue, integer
from host.tuning.private_server import PrivateServer
from host.tuning.search import Limits, Search
from host.tuning.settings import Settings, check_text, edit_text
from host.tuning.trial import Goal, Trial, Trials, default_most_instances
from pb_utils._text_form import InvalidInput
from stub.wire.paths import absolute_path

_ABOUT = """\
Finds the number of instances, max_batch_size and max_queue_delay_microseconds of a model, and
writes what is better into its config.pbtxt, after a question. Sizes of preferred_batch_size are
removed if the model is as good without them.
The model is served by a server of its own on private ports, with the other models of its
repository for BLS, and measured with the load generator of pbhost bench. Each step of the table is
a trial; the last column names what limits it:

  model   the instances are busy: only a faster model, larger batches or more instances help
  host    the server process is busy
  queue   requests wait although the instances are not busy, as for the delay of a batch
  client  the load generator or its machine is busy: the model may be faster than measured

Batches are changed only if the configuration has max_batch_size, which may become larger, but not
smaller, as clients may send batches of this size. The goal is the highest rate (throughput), or the
highest rate at which a latency is not longer than given. Run it on a machine that has nothing else
to do.

examples:
  pbhost tune models/resnet --shape=IMAGE:3,224,224
  pbhost tune models/resnet --goal=p99=20ms --max-instances=4 --dry-run

exit status: 0 done, also if nothing is better; 1 the model cannot be loaded or measured, or Ctrl-C
ended it; 2 the command line is invalid, or the inputs do not match the model"""

_GOAL = re.compile(r"p(\d{1,2}(?:\.\d+)?)=(\d+(?:\.\d+)?)(us|ms|s)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def read_goal(text: str) -> Goal:
    """Returns the goal in the value of the flag. Raises InvalidValue."""
    if text == "throughput":
        return Goal()
    found = _GOAL.fullmatch(text)
    if found is None or not float(found[1]) or not float(found[2]):
        raise InvalidValue(f"expected throughput, or a latency as p99=20ms; got '{text}'")
    return Goal(float(found[1]) / 100, float(found[2]) * _UNITS[found[3]])


def _check_seconds(seconds: float) -> None:
    if not 5 <= seconds <= 86400:
        raise InvalidValue(f"expected 5 to 86400 seconds, got {seconds:g}")


_group = FlagGroup("Tuning")
_inputs = FlagGroup("Requests")


@dataclass
class TuneOptions:
    """The flags of `pbhost tune`."""

    goal: str = _group("throughput", "Goal: throughput, or as p99=20ms.", check=read_goal)
    max_instances: int = _group(
        0, "Instances at most; 0: four for each CPU, at least 16.", integer(0, 1024)
    )
    max_batch: int = _group(
        0,
        "Batch at most; 0: 64, or the model's max_batch_size if it is larger.",
        integer(0, 1 << 20),
    )
    seconds: float = _group(110.0, "Seconds for all trials.", check=_check_seconds)
    yes: bool = _group(False, "Write the configuration without a question.", SWITCH)
    dry_run: bool = _group(False, "Show the change of the configuration only.", SWITCH)
    backend_directory: str = serve_flag("backend_directory")
    input: list[str] = _inputs(
        [],
        "Input, as NAME=VALUE, with the values of pbhost infer. You can repeat this flag.",
        check=check_inputs,
    )
    shape: list[str] = _inputs(
        [],
        "Dimensions of an input, as NAME:SIZE,SIZE,... without the batch. You can repeat this"
        " flag.",
        check=read_shapes,
    )
    input_data: str = _inputs("", "File or folder with the inputs of requests, sent in turn.")
    recording: str = _inputs("", "Folder of pbhost record, whose requests are sent in turn.")
    parameter: list[str] = _inputs(
        [],
        "Parameter of the requests, as NAME=VALUE. You can repeat this flag.",
        check=read_parameters,
    )


def main(arguments: Sequence[str]) -> NoReturn:
    """Tunes the model and exits."""
    (directory,), options = parse_texts(arguments, "tune MODEL_DIR", _ABOUT, TuneOptions)
    if options.yes and options.dry_run:
        fail("tune", "give either --yes or --dry-run", EXIT_USAGE)
    with errors_end("tune", InvalidInput, one_line=True):
        try:
            check_together(options)
            _tune(Path(absolute_path(directory)), options)
        except KeyboardInterrupt:
            sys.stdout.write("\nnothing was written\n")
            sys.exit(EXIT_FAILED)
    sys.exit(0)


def _tune(directory: Path, options: TuneOptions) -> None:
    """Raises HostError and InvalidInput."""
    if not directory.is_dir():
        raise InvalidInput(f"'{directory}' is not a model directory")
    reject_repository(directory)
    if not is_model(directory):
        raise InvalidInput(f"'{directory}' is not a model directory")
    goal = read_goal(options.goal)
    with PrivateServer(directory, options.backend_directory) as server, Workers() as workers:
        server.load()
        config = server.read_config()
        start = Settings.of(config)
        limits = limits_of(start, options)
        load = _make_load(server, directory.name, options)
        table = _Table(goal)
        end = time.monotonic() + options.seconds
        trials = Trials(
            server, workers, load, config, goal, table.add, lambda: time.monotonic() < end
        )
        search = Search(start, limits, trials.measure)
        best = search.run()
    first, last = search.results.get(start), search.results.get(best)
    if first is None:
        raise invalid_argument(f"model '{directory.name}' could not be measured: {table.error}")
    if time.monotonic() > end:
        sys.stdout.write(f"the time of {options.seconds:g} s is over; --seconds gives more\n")
    if best == start or last is None:
        sys.stdout.write("nothing is better than the present configuration by more than noise\n")
        return
    p99, p99_before = (format_milliseconds(one.measured.latency(0.99)) for one in (last, first))
    sys.stdout.write(
        f"best: {_describe(best)}: {format_rate(last.measured.rate)} requests/s instead of"
        f" {format_rate(first.measured.rate)}, p99 {p99} ms instead of {p99_before} ms\n"
    )
    if best.instances == limits.instances:
        sys.stdout.write(f"more than {best.instances} instances were not tried: --max-instances\n")
    if not last.met:
        sys.stdout.write(f"no settings reach {options.goal}\n")
    write_settings(directory / "config.pbtxt", start, best, options)


def limits_of(start: Settings, options: TuneOptions) -> Limits:
    """Raises InvalidInput for limits that are below the present settings."""
    for flag, most, present in (
        ("--max-instances", options.max_instances, start.instances),
        ("--max-batch", options.max_batch, start.max_batch_size),
    ):
        if 0 < most < present:
            raise InvalidInput(f"{flag}: expected at least {present}, as the model has, got {most}")
    return Limits(
        options.max_instances or max(default_most_instances(), start.instances),
        options.max_batch or max(64, start.max_batch_size),
        start.max_batch_size > 0,
    )


def _make_load(server: PrivateServer, model: str, options: TuneOptions) -> Load:
    """Raises HostError and InvalidInput."""
    config = server.client.read_config(model, "")
    decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
    protocol = Protocol.GRPC_STREAM if decoupled else Protocol.GRPC
    inputs = Inputs(
        split_inputs(options.input), read_shapes(options.shape), data=options.input_data,
        recording=options.recording, parameters=read_parameters(options.parameter),
    )  # fmt: skip
    inferences = make_inferences(config, model, "", inputs)
    server.client.try_request(inferences[0], decoupled)
    chains = encode_chains([inferences], server.url, protocol, {})
    return Load(make_target(server.url, protocol, {}), chains)


def _describe(settings: Settings) -> str:
    parts = [f"{settings.instances} instance{'s' * (settings.instances != 1)}"]
    if settings.dynamic:
        parts.append(f"batches of up to {settings.max_batch_size}")
        parts += [f"a delay of {settings.delay} us"] * bool(settings.delay)
        if settings.preferred:
            parts.append(f"preferred sizes {', '.join(map(str, settings.preferred))}")
    elif settings.max_batch_size:
        parts.append("no batches made by the server")
    return ", ".join(parts)


class _Table:
    """Prints a line for each trial."""

    def __init__(self, goal: Goal) -> None:
        self._goal = goal
        self._count = 0
        self._best = -float("inf")
        self._columns: dict[str, Callable[[Settings], str]] = {
            "instances": lambda one: str(one.instances),
            "max_batch_size": lambda one: str(one.max_batch_size) if one.dynamic else "-",
            "delay us": lambda one: str(one.delay) if one.dynamic else "-",
            "preferred": lambda one: ",".join(map(str, one.preferred)) or "-",
        }
        self.error = ""

    def add(self, settings: Settings, trial: Trial | str) -> None:
        """Prints a trial, or why there is none."""
        self._count += 1
        cells = {"step": str(self._count)}
        cells |= {title: text(settings) for title, text in self._columns.items()}
        if isinstance(trial, str):
            self.error = trial
            cells["requests/s"] = "failed: " + " ".join(escape_control_characters(trial).split())
        else:
            measured = trial.measured
            server = measured.server
            cells["concurrency"] = str(measured.level.concurrency)
            cells["requests/s"] = format_rate(measured.rate)
            cells["p50 ms"] = format_milliseconds(measured.latency(0.5))
            cells["p99 ms"] = format_milliseconds(measured.latency(0.99))
            cells["batch"] = f"{server.batch:.1f}" if server is not None else "-"
            cells["instances busy"] = f"{100 * trial.busy_instances:.0f} %"
            cells["host busy"] = f"{100 * trial.busy_host:.0f} %"
            cells["bottleneck"] = trial.bottleneck
            if trial.score > self._best:
                self._best = trial.score
                cells["bottleneck"] += " *"
        if self._count == 1:
            titles = "  ".join(title.rjust(_width(title)) for title in _TITLES)
            sys.stdout.write(f"{titles}   (* best so far)\n")
        line = "  ".join(
            text.rjust(_width(title)) if title != "bottleneck" else text
            for title, text in cells.items()
        )
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


_TITLES = (
    *("step", "instances", "max_batch_size", "delay us", "preferred", "concurrency", "requests/s"),
    *("p50 ms", "p99 ms", "batch", "instances busy", "host busy", "bottleneck"),
)


def _width(title: str) -> int:
    return max(len(title), 7)


def write_settings(path: Path, before: Settings, after: Settings, options: TuneOptions) -> None:
    """Shows the changed lines and writes them. Raises HostError."""
    try:
        text = path.read_bytes().decode() if path.exists() else ""
        newline = "\r\n" if text.count("\r\n") == text.count("\n") > 0 else "\n"
        old = text.replace(newline, "\n")
        new = edit_text(old, before, after, str(path))
        check_text(new, str(path), before, after)
    except (OSError, UnicodeDecodeError) as error:
        raise invalid_argument(f"'{path}' cannot be read: {error}") from error
    if new == old:
        sys.stdout.write(f"{path} stays as it is: auto_complete_config of the model sets this\n")
        return
    sys.stdout.write("".join(_changed_lines(old, new, path)))
    if options.dry_run:
        return
    if not options.yes:
        if not sys.stdin.isatty():
            sys.stdout.write("not written: --yes writes it without a question\n")
            return
        if not _confirm(f"write {path}? [y/N] "):
            sys.stdout.write("not written\n")
            return
    try:
        _replace(path, new.replace("\n", newline))
    except OSError as error:
        raise invalid_argument(f"'{path}' cannot be written: {error.strerror}") from error
    sys.stdout.write(f"written to {path}\n")


def _confirm(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        sys.stdout.write("\n")
        return False


def _replace(path: Path, text: str) -> None:
    """Replaces a file as a whole: servers that poll the folder never read a part of it."""
    path = path.resolve()  # a link stays
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(text.encode())
        if path.exists():
            shutil.copymode(path, fresh)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)


def _changed_lines(old: str, new: str, path: Path) -> list[str]:
    import difflib

    return [
        line if line.endswith("\n") else f"{line}\n"
        for line in difflib.unified_diff(
            old.splitlines(keepends=True), new.splitlines(keepends=True), str(path), str(path), n=1
        )
    ]
