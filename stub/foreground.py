"""What `pbhost run` runs: one model in this process, at the terminal, without a server.

Started by path, with a descriptor's number: from there comes the job, as JSON.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
if not sys.path or os.path.realpath(sys.path[0]) != os.path.realpath(_here):
    sys.path.insert(0, _here)  # with PYTHONSAFEPATH, Python has not put it there
sys.path[0] = os.path.dirname(_here)

import bdb  # noqa: E402
import json  # noqa: E402
import pdb  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from cProfile import Profile  # noqa: E402
from types import TracebackType  # noqa: E402
from typing import Any, Dict, List, Optional  # noqa: E402

import numpy as np  # noqa: E402

import pb_utils  # noqa: E402
from pb_utils import testing  # noqa: E402
from pb_utils._datatypes import BF16, NAMES  # noqa: E402
from stub.literals import InvalidInput, read_inputs  # noqa: E402
from stub.module_isolation import isolate_modules  # noqa: E402

SUCCEEDED, FAILED, BAD_USAGE = 0, 1, 2
"""Exit statuses: every response is a good one; one is an error, or the model raised; bad usage."""

_NO_TIMEOUT_SECONDS = 1e8  # seconds: nobody is in a hurry at a breakpoint


class Job:
    """What the command line asked for, with the model's configuration."""

    def __init__(self, text: str) -> None:
        told: Dict[str, Any] = json.loads(text)
        self.directory: str = told["directory"]
        self.version: int = told["version"]
        self.backend: str = told["backend"]
        self.config: str = told["config"]
        self.inputs: List[List[str]] = told["inputs"]
        self.count: int = told["count"]
        self.profile: str = told["profile"]
        self.debug: bool = told["debug"]


class ModelFailed(Exception):
    """The model answered with an error."""


def run_job(job: Job) -> int:
    """Load the model, send the request, print what comes; the exit status."""
    try:
        with testing.load(
            job.directory,
            job.config,
            version=job.version,
            response_timeout=_NO_TIMEOUT_SECONDS,
            backend=job.backend or None,
            on_log=_print_log,
        ) as model:
            inputs = read_inputs([(name, text) for name, text in job.inputs], model.config)
            _execute(model, inputs, job)
    except InvalidInput as problem:
        print(f"pbhost run: {problem}", file=sys.stderr)
        return BAD_USAGE
    except ModelFailed:
        return FAILED
    except bdb.BdbQuit:
        return FAILED  # `q` at a breakpoint: whoever typed it knows
    except (Exception, SystemExit) as error:
        _print_exception(error, job)
        return FAILED
    return SUCCEEDED


def _print_exception(error: BaseException, job: Job) -> None:
    """Show what the model has raised, and where."""
    trace = _skip_own_frames(error.__traceback__)
    traceback.print_exception(type(error), error, trace)
    if job.debug:
        pdb.post_mortem(trace)


def _execute(model: testing.ModelHarness, inputs: Dict[str, Any], job: Job) -> None:
    """Raises ModelFailed, or what the model raises."""
    profile = Profile() if job.profile else None
    times: List[float] = []
    for turn in range(job.count):
        responses = _ResponsePrinter(show=turn == 0)
        request = model.request(inputs)
        if profile is not None:
            profile.enable()
        started = time.perf_counter()
        try:
            model.run(request, responses)
        except bdb.BdbQuit:
            raise
        except (Exception, SystemExit) as error:
            _print_exception(error, job)  # here, while the model is still as it was
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
    print(f"{len(times)} times: {times[0]:.3f} ms at best, {middle:.3f} ms in the middle, ", end="")
    print(f"{times[-1]:.3f} ms at worst")


def _print_log(record: testing.LogRecord) -> None:
    place = f"{record.filename}:{record.line}"
    print(f"{record.level.name[0]} {place}] {record.message}", file=sys.stderr)


class _ResponsePrinter:
    """Takes the responses to one request, and shows them one by one, as they come."""

    def __init__(self, show: bool) -> None:
        self._show = show
        self._count = 0
        self._errors: List[str] = []

    def __call__(self, response: pb_utils.InferenceResponse) -> None:
        self._count += 1
        error = response.error()
        if error is not None:
            # Told at the end: if the model has raised, its traceback says more.
            self._errors.append(f"response {self._count}: error: {error.message()}")
        elif self._show:
            _print_response(self._count, response)

    def finish(self) -> None:
        """That was all. Raises ModelFailed."""
        for text in self._errors:
            print(text, file=sys.stderr)
        if self._errors:
            raise ModelFailed
        if self._show and not self._count:
            print("no response")


def _print_response(number: int, response: pb_utils.InferenceResponse) -> None:
    parameters = response.parameters()
    print(f"response {number}" + (f", parameters {parameters}" if parameters != "{}" else ""))
    for tensor in response.output_tensors():
        print(f"  {tensor.name()} {NAMES[tensor.triton_dtype()]} {tensor.shape()}")
        text = np.array2string(_readable_array(tensor), threshold=64, separator=", ")
        print("\n".join(f"    {line}" for line in text.split("\n")))


def _readable_array(tensor: pb_utils.Tensor) -> "np.ndarray[Any, Any]":
    """For reading: text as text, and BF16 as 32 bits."""
    if tensor.triton_dtype() == BF16:
        halves = np.frombuffer(tensor._wire_data(), np.uint16).astype(np.uint32)
        wide: np.ndarray[Any, Any] = (halves << np.uint32(16)).view(np.float32)
        return wide.reshape(tensor.shape())
    array = tensor.as_numpy()
    if array.dtype != np.object_:
        return array
    texts = np.empty(array.size, dtype=np.object_)
    for index, element in enumerate(array.flat):
        try:
            texts[index] = element.decode()
        except UnicodeDecodeError:
            texts[index] = element
    return texts.reshape(array.shape)


def _skip_own_frames(trace: Optional[TracebackType]) -> Optional[TracebackType]:
    """Without the frames that led to the model; all of them, if it did not get that far."""
    ours = (_here + os.sep, os.path.dirname(os.path.abspath(pb_utils.__file__)) + os.sep)
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename.startswith(ours):
        part = part.tb_next
    return part or trace


if __name__ == "__main__":
    with open(int(sys.argv[1]), encoding="utf-8") as source:
        given = Job(source.read())
    sys.argv[:] = [""]
    # As in a server: the working directory, then what is installed; the harness adds the model's.
    sys.path[0] = ""
    sys.path.append(os.path.dirname(_here))
    if not given.backend.startswith(_here + os.sep):  # backends of ours import our modules
        isolate_modules()
    sys.exit(run_job(given))
