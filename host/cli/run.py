"""`pbhost run`: runs one model at the terminal, without a server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import stub.wire
from host.cli.arguments import (
    INPUT_VALUES,
    errors_end,
    input_flag,
    parse_texts,
    split_inputs,
)
from host.cli.model_arguments import find_model, is_model, reject_repository, serve_flag
from host.config.model_config import LoadedConfig
from host.config.schema import ModelConfig
from host.environments.model_environments import Environments, needs_environment
from host.errors import HostError, invalid_argument, unsupported
from host.instances.gpus import find_gpus
from host.models.instance_loader import describe_model, read_model
from host.options.flags import SIZE, SWITCH, FlagGroup, integer
from host.options.options import Options
from host.recording.recording import RecordedRequest, RecordingReader
from stub.wire.messages import ModelSource
from stub.wire.paths import absolute_path

_ENTRY = Path(stub.wire.__file__).parents[1] / "foreground.py"
_LEAST_CAPABILITY = Options().min_supported_compute_capability

_ABOUT = f"""\
Loads one model in this process, sends it one request, prints the responses, and finalizes it.
There is no server and no other process: breakpoint() works in model.py, print writes to the
terminal, and a profiler sees the model's own frames. The models of the same repository that it
calls (BLS) are loaded in this process too, when it calls them.

{INPUT_VALUES.format("the configuration")}

examples:
  pbhost run models/add_sub --input 'INPUT0=[1, 2, 3, 4]' --input INPUT1=random
  pbhost run models/greet --input NAME=World
  pbhost run models/classify --input IMAGE=@cat.png
  pbhost run models/resnet --input image=@cat.npy --count 100 --profile resnet.prof

exit status: 0 all responses are successful; 1 a response is an error, or the model cannot be
loaded; 2 the command line is invalid, or the inputs do not match the model"""


_group = FlagGroup("Run")


@dataclass
class RunOptions:
    """The flags of `pbhost run`."""

    input: list[str] = input_flag(_group)
    version: int | None = _group(
        None, "Version to run; by default, the one that a server uses.", SIZE
    )
    count: int = _group(1, "Number of executions.", integer(1))
    profile: str = _group("", "Save a profile (cProfile) of the executions to this file.")
    pdb: bool = _group(False, "Open the debugger where the model raises an exception.", SWITCH)
    backend_directory: str = serve_flag("backend_directory")
    repository_cache_directory: str = serve_flag("repository_cache_directory")


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs the model instead of this process, or in a child process with another Python."""
    (place,), options = parse_texts(arguments, "run MODEL_DIR", _ABOUT, RunOptions)
    with errors_end("run"):
        _run(find_model(place, options.repository_cache_directory), options)


def _run(
    directory: Path,
    options: RunOptions,
    recorded: Mapping[str, Any] | None = None,
    contents: Sequence[bytes] = (),
) -> NoReturn:
    """Runs the model; `contents` are the inputs of a recorded request. Raises HostError."""
    gpus = asyncio.run(find_gpus(_LEAST_CAPABILITY))
    source, loaded = _find_model(directory, options, gpus)
    others = _find_others(directory, options, gpus)
    job = {**_describe_job(options, source, loaded, others), "recorded": recorded}
    descriptor = _write_job(job, contents)
    if needs_environment(loaded.config):
        signal.signal(signal.SIGINT, lambda number, frame: None)  # the model handles Ctrl-C
        place = Path(source.directory)
        sys.exit(asyncio.run(_run_in_environment(descriptor, loaded.config, place)))
    os.execv(sys.executable, [sys.executable, str(_ENTRY), str(descriptor)])


def run_recorded(
    directory: Path,
    reader: RecordingReader,
    request: RecordedRequest,
    debug: bool,
    backend_directory: str,
) -> NoReturn:
    """Runs a recorded request instead of one from the command line. Raises HostError."""
    options = RunOptions(pdb=debug, backend_directory=backend_directory)
    contents = [reader.read_tensor(tensor) for tensor in request.inputs]
    _run(directory, options, _describe_recorded(request), contents)


def _describe_recorded(request: RecordedRequest) -> dict[str, Any]:
    """Returns the request as the process of the model gets it, without the bytes of its inputs."""
    parameters = dict(request.parameters)
    flags = sum(
        flag
        for flag, name in ((1, "sequence_start"), (2, "sequence_end"))
        if parameters.pop(name, False)
    )
    parameters.pop("priority", None)
    return {
        "inputs": [
            {"name": one.name, "datatype": one.datatype, "shape": one.shape, "size": one.size}
            for one in request.inputs
        ],
        "request_id": request.id,
        "correlation_id": parameters.pop("sequence_id", 0),
        "flags": flags,
        "timeout": parameters.pop("timeout", 0),
        "parameters": parameters,
        "requested_outputs": request.requested_outputs,
    }


async def _run_in_environment(job: int, config: ModelConfig, directory: Path) -> int:
    """Runs the model in its environment; returns the exit status. Raises HostError."""
    options = Options()
    environments = Environments(options.environment_cache, options.environment_timeout_secs)
    try:
        environment = await environments.prepare(config, directory)
        assert environment is not None
        entry = environment.sources.entry.with_name(_ENTRY.name)
        command = [str(environment.python), str(entry), str(job)]
        return await asyncio.to_thread(_run_and_wait, command, environment.variables(os.environ))
    finally:
        await environments.close()


def _run_and_wait(command: list[str], variables: dict[str, str]) -> int:
    """Runs a process on this terminal; returns its exit status as a shell reports it."""
    _, status = os.waitpid(os.posix_spawn(command[0], command, variables), 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _find_model(
    directory: Path, options: RunOptions, gpus: Sequence[int]
) -> tuple[ModelSource, LoadedConfig]:
    """Finds the model. Raises HostError."""
    if not directory.is_dir():
        raise invalid_argument(f"'{directory}' is not a model directory")
    reject_repository(directory)
    return _read_model(Path(absolute_path(str(directory))), options, gpus, options.version)


def _find_others(
    directory: Path, options: RunOptions, gpus: Sequence[int]
) -> dict[str, Mapping[str, Any]]:
    """Describes the other models of the repository: how to load each one, or why it cannot be."""
    others: dict[str, Mapping[str, Any]] = {}
    logging.disable(logging.WARNING)  # most of them are not called
    own = Path(absolute_path(str(directory)))
    for path in sorted(own.parent.iterdir()):
        if path == own or not is_model(path):
            continue
        try:
            source, loaded = _read_model(path, options, gpus, None)
            if needs_environment(loaded.config):
                raise unsupported("it has an environment of its own, which needs another process")
            others[path.name] = describe_model(source, loaded)
        except HostError as error:
            others[path.name] = {"problem": error.message}
    logging.disable(logging.NOTSET)
    return others


def _read_model(
    directory: Path, options: RunOptions, gpus: Sequence[int], version: int | None
) -> tuple[ModelSource, LoadedConfig]:
    """Reads the configuration of a model and finds its backend. Raises HostError."""
    return read_model(
        directory,
        version,
        backend_directory=options.backend_directory,
        gpus=gpus,
        least_capability=_LEAST_CAPABILITY,
    )


def _describe_job(
    options: RunOptions,
    source: ModelSource,
    loaded: LoadedConfig,
    others: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    return {
        **describe_model(source, loaded),
        "others": others,
        "inputs": split_inputs(options.input),
        "count": options.count,
        "profile": options.profile and absolute_path(options.profile),
        "debug": options.pdb,
    }


def _write_job(job: Mapping[str, Any], contents: Sequence[bytes]) -> int:
    """Writes a line of JSON and bytes of tensors to a file in memory; returns its descriptor.

    An argument would be too short for large configurations, and the model can read stdin.
    """
    descriptor = os.memfd_create("pbhost-run", 0)
    with open(descriptor, "wb", closefd=False) as file:
        file.writelines([json.dumps(job).encode(), b"\n", *contents])
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
