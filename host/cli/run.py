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
There is no server and no process between: breakpoint() works in model.py, print goes to the
terminal, and a profiler sees the model's own frames. Requests of the model to other models (BLS)
are answered with an error."""

_EPILOG = """\
VALUE is one of
  JSON         typed by the model's configuration; brackets make dimensions
  @FILE.json   the same from a file
  @FILE.npy    an array saved by numpy, of exactly the input's type
  random       the same arbitrary values every time; dimensions of any size get size 1
For a TYPE_STRING input, what is not JSON is the text itself. A missing batch dimension is added,
and a single number or text stands for a tensor of one element.

examples:
  pbhost run models/add_sub --input 'INPUT0=[1, 2, 3, 4]' --input INPUT1=random
  pbhost run models/greet --input NAME=World
  pbhost run models/resnet --input image=@cat.npy --count 100 --profile resnet.prof

exit status: 0 all responses are good; 1 a response is an error, or the model or its configuration
cannot be used; 2 the command line is wrong, or inputs do not fit the model"""


def main(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by one that runs the model, or waits for one with another Python."""
    args = _parser().parse_args(arguments)
    try:
        source, loaded = _find_model(args)
        job = _write_job(args, source, loaded.config)
        if needs_environment(loaded.config):
            signal.signal(signal.SIGINT, lambda number, frame: None)  # Ctrl-C is for the model
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
    """The exit status of a process on this terminal, as a shell reports it."""
    _, status = os.waitpid(os.posix_spawn(command[0], command, variables), 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("run", _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add("model_dir", type=Path, metavar="MODEL_DIR", help="folder of the model: config, versions")
    add(
        "--input",
        type=_input,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an input of the request; once for each",
    )
    add("--version", type=int, metavar="N", help="version to run; as a server would if not given")
    add("--count", type=_positive, default=1, metavar="N", help="execute so many times (1)")
    add("--profile", default="", metavar="FILE", help="save a profile (cProfile) of the executions")
    add("--pdb", action="store_true", help="debug what the model raises, where it was raised")
    return parser


def _input(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got '{text}'")
    return name, value


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, got '{text}'")
    return int(text)


def _find_model(args: argparse.Namespace) -> tuple[ModelSource, LoadedConfig]:
    """Finds the model. Raises HostError."""
    directory = args.model_dir.absolute()
    if not directory.is_dir():
        raise invalid_argument(f"'{args.model_dir}' is no folder of a model")
    reject_repository(args.model_dir)
    loaded = configuration.load_config(
        directory,
        strict=False,
        gpus=asyncio.run(find_gpus(_LEAST_CAPABILITY)),
        least_capability=_LEAST_CAPABILITY,
    )
    if is_ensemble(loaded.config):
        raise invalid_argument(
            f"model '{loaded.config.name}' is an ensemble, which has no code to run"
        )
    version = _choose_version(directory, loaded, args.version)
    return Backends(args.backend_directory).find_backend(directory, version, loaded)


def _write_job(args: argparse.Namespace, source: ModelSource, config: ModelConfig) -> int:
    """A file descriptor with the job of the process.

    It is a file in memory, as a configuration may be longer than an argument, and stdin belongs to
    the user.
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
    """The requested version, or the one that clients get without a version. Raises HostError."""
    available = list_versions(directory)
    if wanted is None:
        return select_versions(loaded.config, available)[-1]
    if wanted not in available:
        found = ", ".join(map(str, available)) or "none"
        raise invalid_argument(
            f"model '{loaded.config.name}' has no version {wanted}; its versions are: {found}"
        )
    return wanted
