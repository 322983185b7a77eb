"""The process of `pbhost run`: runs one model at the terminal, without a server.

It is started by path. Its argument is the number of a file descriptor, from which it reads the job
as JSON.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
if getattr(sys.flags, "safe_path", False):
    sys.path.insert(0, _here)  # otherwise Python has done this
sys.path[0] = os.path.dirname(_here)

import bdb  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import pdb  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from contextlib import ExitStack, closing  # noqa: E402
from cProfile import Profile  # noqa: E402
from types import TracebackType  # noqa: E402
from typing import Any, Dict, List, NoReturn, Optional, Sequence  # noqa: E402

import pb_utils  # noqa: E402
from pb_utils import testing  # noqa: E402
from pb_utils._api_modules import report_to  # noqa: E402
from pb_utils._datatypes import CODES  # noqa: E402
from pb_utils._model_code import find_mismatches  # noqa: E402
from pb_utils._text_form import (  # noqa: E402
    InvalidInput,
    format_response,
    read_inputs,
)
from stub.bls_models import BlsModels  # noqa: E402
from stub.imports import isolate_modules  # noqa: E402

SUCCEEDED, FAILED, BAD_USAGE = 0, 1, 2
"""Exit statuses: success; an error response, or an exception of the model; invalid arguments."""

_NO_TIMEOUT_SECONDS = 1e8  # no timeout, because the user may stand at a breakpoint


class Job:
    """The arguments of the command line, and the model's configuration."""

    def __init__(self, text: bytes, contents: bytes) -> None:
        fields: Dict[str, Any] = json.loads(text)
        self.recorded: Optional[Dict[str, Any]] = fields["recorded"]
        self.contents = contents  # the bytes of the inputs of a recorded request
        self.directory: str = fields["directory"]
        self.version: int = fields["version"]
        self.backend: str = fields["backend"]
        self.config: str = fields["config"]
        self.others: Dict[str, Dict[str, Any]] = fields["others"]
        self.inputs: List[List[str]] = fields["inputs"]
        self.count: int = fields["count"]
        self.profile: str = fields["profile"]
        self.debug: bool = fields["debug"]


class ModelFailed(Exception):
    """The model returned an error, or raised an exception that is printed already."""


def run_job(job: Job) -> int:
    """Loads the model, sends the request and prints the responses; returns the exit status."""
    others = BlsModels(job.others, _NO_TIMEOUT_SECONDS, _print_log)
    try:
        with ExitStack() as stack:  # Python 3.8 cannot read parentheses around two contexts
            stack.enter_context(closing(others))
            model = stack.enter_context(
                testing.load(
                    job.directory,
                    job.config,
                    version=job.version,
                    models=others,
                    response_timeout=_NO_TIMEOUT_SECONDS,
                    backend=job.backend or None,
                    on_log=_print_log,
                )
            )
            others.add(model, job.directory)
            if job.recorded is None:
                inputs = read_inputs([(name, text) for name, text in job.inputs], model.config)
                request: Dict[str, Any] = {"inputs": inputs}
            else:
                tensors = _read_recorded_inputs(job.recorded["inputs"], job.contents)
                request = {**job.recorded, "inputs": tensors}
            _execute(model, request, job)
    except InvalidInput as problem:
        print(f"pbhost run: {problem}", file=sys.stderr)
        return BAD_USAGE
    except ModelFailed:
        return FAILED
    except bdb.BdbQuit:
        return FAILED  # the user typed `q` at a breakpoint
    except (Exception, SystemExit) as error:
        _print_exception(error, job)
        return FAILED
    return SUCCEEDED


def _read_recorded_inputs(
    described: List[Dict[str, Any]], contents: bytes
) -> Dict[str, pb_utils.Tensor]:
    """The inputs of a recorded request; their bytes follow each other in `contents`."""
    inputs: Dict[str, pb_utils.Tensor] = {}
    offset = 0
    for one in described:
        content = memoryview(contents)[offset : offset + one["size"]]
        offset += one["size"]
        inputs[one["name"]] = pb_utils.Tensor._from_wire(
            one["name"], CODES[one["datatype"]], one["shape"], content, None
        )
    return inputs


def _print_exception(error: BaseException, job: Job) -> None:
    """Prints an exception of the model with its traceback; starts pdb if the job says so.

    An invalid return value or a missing class has no line in the model, so only the message is
    printed.
    """
    trace = _skip_own_frames(error.__traceback__)
    known = isinstance(error, pb_utils.TritonModelException) and error.__cause__ is None
    if trace is None and known:
        print(f"pbhost run: {error}", file=sys.stderr)
        return
    trace = trace or error.__traceback__
    traceback.print_exception(type(error), error, trace)
    if job.debug:
        pdb.post_mortem(trace)


def _execute(model: testing.ModelHarness, fields: Dict[str, Any], job: Job) -> None:
    """Sends the request `job.count` times. `fields`: the arguments of `model.request`.

    Raises ModelFailed, or what the model raises.
    """
    profile = Profile() if job.profile else None
    times: List[float] = []
    for turn in range(job.count):
        responses = _ResponsePrinter(turn == 0, model.config, fields.get("requested_outputs", ()))
        request = model.request(**fields)
        if profile is not None:
            profile.enable()
        started = time.perf_counter()
        try:
            model.run(request, responses)
        except bdb.BdbQuit:
            raise
        except (Exception, SystemExit) as error:
            _print_exception(error, job)  # here, because the model has not been finalized yet
            raise ModelFailed from error
        finally:
            times.append(time.perf_counter() - started)
            if profile is not None:
                profile.disable()
        responses.finish()
    _print_times(times)
    if profile is not None:
        profile.dump_stats(job.profile)
        print(f"profile in {job.profile}; to read it: python -m pstats {job.profile}")


def _print_times(seconds: List[float]) -> None:
    times = sorted(1000 * each for each in seconds)
    if len(times) == 1:
        print(f"done in {times[0]:.3f} ms")
        return
    middle = times[len(times) // 2]
    print(f"{len(times)} runs: {times[0]:.3f} ms minimum, {middle:.3f} ms median, ", end="")
    print(f"{times[-1]:.3f} ms maximum")


def _print_log(record: testing.LogRecord) -> None:
    location = f"{record.filename}:{record.line}"
    print(f"{record.level.name[0]} {location}] {record.message}", file=sys.stderr)


def _print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


class _ResponsePrinter:
    """Prints the responses to one request as they arrive.

    It warns of declared outputs that are missing or differ: a server would pass the response on.
    """

    def __init__(self, show: bool, config: Dict[str, Any], requested: Sequence[str]) -> None:
        self._show = show
        self._config = config
        self._requested = requested
        self._count = 0
        self._errors: List[str] = []

    def __call__(self, response: pb_utils.InferenceResponse) -> None:
        self._count += 1
        error = response.error()
        if error is not None:
            # Printed at the end: if the model raises an exception, its traceback says more.
            self._errors.append(f"response {self._count}: error: {error.message()}")
        elif self._show:
            print(format_response(self._count, response), flush=True)
            for text in find_mismatches(response, self._config, self._requested):
                _print_warning(text)

    def finish(self) -> None:
        """Prints the errors after the last response. Raises ModelFailed if there are any."""
        for text in self._errors:
            print(text, file=sys.stderr)
        if self._errors:
            raise ModelFailed
        if self._show and not self._count:
            print("no response")


_NOT_OF_MODEL = (
    _here + os.sep,
    os.path.dirname(os.path.abspath(pb_utils.__file__)) + os.sep,
    os.path.dirname(importlib.__file__) + os.sep,
    "<frozen importlib",
)
"""Beginnings of the file names of this project and of the import system."""


def _skip_own_frames(trace: Optional[TracebackType]) -> Optional[TracebackType]:
    """Returns the traceback from the first frame of the model on; None if it has none."""
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename.startswith(_NOT_OF_MODEL):
        part = part.tb_next
    return part


def _tell_of_exits() -> None:
    """Makes `os._exit` of the model say that it ends the process: nothing else would."""
    exit_at_once, own_pid = os._exit, os.getpid()

    def tell_and_exit(status: int) -> NoReturn:
        try:
            if os.getpid() == own_pid:  # not in a forked child, which ends like this
                caller = sys._getframe(1)
                place = f"{caller.f_code.co_filename}, line {caller.f_lineno}"
                text = f"pbhost run: os._exit({status}) ends the process: {place}"
                print(text, file=sys.stderr, flush=True)
        finally:
            exit_at_once(status)

    os._exit = tell_and_exit


if __name__ == "__main__":
    _tell_of_exits()
    with open(int(sys.argv[1]), "rb") as source:
        given = Job(source.readline(), source.read())
    sys.argv[:] = [""]
    # As in a server: the working directory, then installed modules. The harness adds the model's.
    sys.path[0] = ""
    sys.path.append(os.path.dirname(_here))
    report_to(_print_warning)
    if not given.backend.startswith(_here + os.sep):  # backends of this project import its modules
        isolate_modules()
    sys.exit(run_job(given))
