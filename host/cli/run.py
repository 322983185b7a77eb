"""`pbhost run`: runs one model at the terminal, without a server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import stub.wire
from host.cli.arguments import make_parser, reject_repository
from host.config import model_config as configuration
from host.config.json_form import to_json
from host.config.model_config import LoadedConfig, ModelConfig
from host.config.schema import is_ensemble
from host.environments.environments import Environments, needs_environment
from host.errors import HostError, invalid_argument
from host.instances.gpus import find_gpus
from host.models.backends import Backends
from host.options.options import Options
from host.repository.repository import list_versions, select_versions
from stub.wire.messages import ModelSource

_ENTRY = Path(stub.wire.__file__).parents[1] / "foreground.py"
_EXIT_FAILED = 1
_LEAST_CAPABILITY = Options().min_supported_compute_capability

_DESCRIPTION = """\
Loads one model in this process, sends it one request, prints the responses, and finalizes it.
There is no server and no other process: breakpoint() works in model.py, print writes to the
terminal, and a profiler sees the model's own frames. Requests of the model to other models (BLS)
fail with an error."""

_EPILOG = """\
VALUE is one of
  JSON         a value or nested arrays; the configuration gives the data type
  @FILE.json   JSON from a file
  @FILE.npy    an array saved by numpy; its dtype must be that of the input
  random       random values, the same in each run; variable dimensions have size 1
For a TYPE_STRING input, text that is not JSON is used as it is. A missing batch dimension is
added, and a single number or text becomes a tensor of one element.

examples:
  pbhost run models/add_sub --input 'INPUT0=[1, 2, 3, 4]' --input INPUT1=random
  pbhost run models/greet --input NAME=World
  pbhost run models/resnet --input image=@cat.npy --count 100 --profile resnet.prof

exit status: 0 all responses are successful; 1 a response is an error, or the model cannot be
loaded; 2 the command line is invalid, or the inputs do not match the model"""


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs the model in place of this process, or in a child process with another Python."""
    args = _parser().parse_args(arguments)
    try:
        source, loaded = _find_model(args)
        job = _write_job(args, source, loaded.config)
        if needs_environment(loaded.config):
            signal.signal(signal.SIGINT, lambda number, frame: None)  # the model handles Ctrl-C
            sys.exit(asyncio.run(_run_in_environment(job, loaded.config, Path(source.directory))))
    except HostError as error:
        sys.stderr.write(f"pbhost run: {error.message}\n")
        sys.exit(_EXIT_FAILED)
    os.execv(sys.executable, [sys.executable, str(_ENTRY), str(job)])


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


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("run", _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add("model_dir", type=Path, metavar="MODEL_DIR", help="model directory")
    add(
        "--input",
        type=_input,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="input of the request; repeat the flag for each input",
    )
    add("--version", type=int, metavar="N", help="version to run (the one that a server uses)")
    add("--count", type=_positive, default=1, metavar="N", help="number of executions (1)")
    add("--profile", default="", metavar="FILE", help="save a profile (cProfile) of the executions")
    add("--pdb", action="store_true", help="open the debugger where the model raises an exception")
    return parser


def _input(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got '{text}'")
    return name, value


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got '{text}'")
    return int(text)


def _find_model(args: argparse.Namespace) -> tuple[ModelSource, LoadedConfig]:
    """Finds the model. Raises HostError."""
    directory = args.model_dir.absolute()
    if not directory.is_dir():
        raise invalid_argument(f"'{args.model_dir}' is not a model directory")
    reject_repository(args.model_dir)
    loaded = configuration.load_config(
        directory,
        strict=False,
        gpus=asyncio.run(find_gpus(_LEAST_CAPABILITY)),
        least_capability=_LEAST_CAPABILITY,
    )
    if is_ensemble(loaded.config):
        raise invalid_argument(
            f"model '{loaded.config.name}' is an ensemble, so it has no code to run"
        )
    version = _choose_version(directory, loaded, args.version)
    return Backends(args.backend_directory).find_backend(directory, version, loaded)


def _write_job(args: argparse.Namespace, source: ModelSource, config: ModelConfig) -> int:
    """Writes the job to a file in memory and returns its descriptor.

    An argument would be too short for large configurations, and the model can read stdin.
    """
    job = {
        "directory": source.directory,
        "version": source.version,
        "backend": source.backend,
        "config": to_json(config),
        "inputs": args.input,
        "count": args.count,
        "profile": args.profile and os.path.abspath(args.profile),
        "debug": args.pdb,
    }
    descriptor = os.memfd_create("pbhost-run", 0)
    with open(descriptor, "w", encoding="utf-8", closefd=False) as file:
        json.dump(job, file)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _choose_version(directory: Path, loaded: LoadedConfig, wanted: int | None) -> int:
    """Returns the wanted version, by default the one that clients get. Raises HostError."""
    available = list_versions(directory)
    if wanted is None:
        return select_versions(loaded.config, available)[-1]
    if wanted not in available:
        found = ", ".join(map(str, available)) or "none"
        raise invalid_argument(
            f"model '{loaded.config.name}' has no version {wanted}; its versions are: {found}"
        )
    return wanted
