"""`pbhost ray`: checks, describes and runs models for a Ray cluster."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from host.cli.arguments import EXIT_USAGE, check_inputs, fail, parse_with_others, split_inputs
from host.options.flags import PORT, Flag, FlagGroup, Status, flags_of, integer, one_of
from host.options.options import Options
from host.options.server_flags import FLAGS
from host.ray.deployment_options import (
    ModelRequirements,
    derive_options,
    read_options,
    read_requirements,
)
from host.ray.model_deployments import model_deployments
from host.repository.object_store.location import is_store_url
from stub.wire.paths import absolute_path

_ABOUT = """\
Serves a model repository on a Ray cluster. Each replica holds a whole server; with
--per-model=true, each model has replicas of its own. The flags of `pbhost serve` are those of the
servers, except for ports and addresses, which Ray's proxies have.

  check    prints what the models need, and what cannot work in several replicas
  config   prints the YAML for `serve run` and `serve deploy`
  run      starts Ray Serve on this machine, or in the cluster of RAY_ADDRESS, until Ctrl-C

examples:
  pbhost ray check models
  pbhost ray config models --replicas=2 > serve.yaml && serve run serve.yaml
  pbhost ray run models --model-control-mode=explicit --load-model=add_sub
  pbhost ray check models --format=json

exit status: 0 success; 1 the models or arguments cannot be served so; 2 the command line is
invalid, or Ray is not installed"""

_FORMATS = {"check": ("text", "json"), "config": ("yaml", "json")}

_group = FlagGroup("Ray")


@dataclass
class RayOptions:
    """The flags of `pbhost ray`."""

    replicas: int = _group(
        0,
        "Number of replicas; the least one with --max-replicas. By default 1, or with"
        " --per-model=true one for each GPU that a model's instance groups name.",
        integer(0),
    )
    max_replicas: int = _group(
        0, "Add replicas up to this number under load; 0 keeps --replicas.", integer(0)
    )
    per_model: bool = _group(
        False, "Make a deployment for each model instead of replicas that hold all models."
    )
    http_port: int = _group(8000, "HTTP port of the proxies.", PORT)
    grpc_port: int = _group(8001, "gRPC port of the proxies.", PORT)
    address: str = _group("0.0.0.0", "Address that the proxies listen on for HTTP.")
    argument: list[str] = _group(
        [],
        "NAME=VALUE: a flag of pbhost serve, with _ instead of -. You can repeat this flag.",
        check=check_inputs,
    )
    format: str = _group(
        "",
        "Output format of check: text or json; of config: yaml or json.",
        check=one_of("format", "", "text", "yaml", "json"),
    )


_SERVER_FLAGS = [
    flag
    for flag in FLAGS
    if flag.status is Status.HONOURED
    and flag.name not in {own.name for own in flags_of(RayOptions)}
    and flag.field != "model_repository"
]


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs `pbhost ray COMMAND REPOSITORY ...`; exits with its status."""
    (command, *repositories), options, flags = parse_with_others(
        arguments, "ray check|config|run REPOSITORY ...", _ABOUT, RayOptions, _SERVER_FLAGS
    )
    commands = {"check": _check, "config": _print_config, "run": _run}
    if command not in commands or not repositories:
        fail("ray", "expected check, config or run, and a repository", EXIT_USAGE)
    known = _FORMATS.get(command, ())
    if known and options.format not in ("", *known):
        expected = " or ".join(known)
        fail("ray", f"expected {expected} as --format of {command}", EXIT_USAGE)
    if importlib.util.find_spec("ray") is None:
        fail("ray", "Ray is not installed; pip install 'pbhost[ray]'", EXIT_USAGE)
    try:
        commands[command](server_arguments(repositories, options, flags), options)
    except ValueError as error:
        fail("ray", str(error))
    sys.exit(0)


def server_arguments(
    repositories: Sequence[str], options: RayOptions, flags: Sequence[tuple[Flag, str]]
) -> dict[str, Any]:
    """Returns the arguments of an application, from its flags and from --argument."""
    places = [one if is_store_url(one) else absolute_path(one) for one in repositories]
    arguments: dict[str, Any] = {"model_repository": places}
    given = [(flag.name.replace("-", "_"), text or "true") for flag, text in flags]
    for name, value in [*given, *split_inputs(options.argument)]:
        known = arguments.setdefault(name, value)
        if known is not value:
            arguments[name] = [*(known if isinstance(known, list) else [known]), value]
    return arguments


def _deployment(options: RayOptions) -> dict[str, Any]:
    least = max(1, options.replicas)
    if options.max_replicas:
        scaling = {"min_replicas": least, "max_replicas": options.max_replicas}
        return {"autoscaling_config": scaling}
    if options.per_model and not options.replicas:
        return {}
    return {"num_replicas": least}


def _check(arguments: dict[str, Any], options: RayOptions) -> None:
    settings = read_options(arguments)
    found = read_requirements(settings)
    for name, text in found.unreadable.items():
        sys.stdout.write(f"{name}: error: {text}\n")
    if found.unreadable:
        sys.exit(1)
    list_needs = _needs_of_deployments if options.per_model else _needs_of_replicas
    needs = list_needs(settings, found, _deployment(options))
    if options.format == "json":
        sys.stdout.write(
            json.dumps({"models": list(found.models), "needs": needs}, indent=2) + "\n"
        )
        return
    sys.stdout.write("".join(f"{line}\n" for line in needs))


def _needs_of_replicas(
    settings: Options, found: ModelRequirements, given: Mapping[str, Any]
) -> list[str]:
    derived = derive_options(settings, found, given)
    lines = [
        f"{name}: sequences keep to one replica in Ray's own proxies, over gRPC or with the header"
        " x-session-id; with HAProxy they need one stream each"
        for name in found.sequence_models
    ]
    lines.append(
        f"{len(found.models)} models; a replica needs {found.gpus} GPUs and takes"
        f" {derived['max_ongoing_requests']} concurrent requests"
    )
    return lines


def _needs_of_deployments(
    settings: Options, found: ModelRequirements, given: Mapping[str, Any]
) -> list[str]:
    lines = []
    for part in model_deployments(settings, {}, given):
        actor, ongoing = part.settings["ray_actor_options"], part.settings["max_ongoing_requests"]
        replicas = part.settings.get("num_replicas", 1)
        several = f"{replicas} replicas; " if replicas > 1 else ""
        lines.append(
            f"{part.model}: {several}a replica needs {actor['num_gpus']} GPUs and"
            f" {actor['num_cpus']} CPUs, and takes {ongoing} concurrent requests"
        )
    return lines


def _print_config(arguments: dict[str, Any], options: RayOptions) -> None:
    import yaml  # Ray needs it too

    from host.ray.serve_config import make_config, make_model_config

    make = make_model_config if options.per_model else make_config
    config = make(arguments, _deployment(options), _proxies(options))
    if options.format == "json":
        sys.stdout.write(json.dumps(config, indent=2) + "\n")
        return
    sys.stdout.write(yaml.safe_dump(config, sort_keys=False))


def _run(arguments: dict[str, Any], options: RayOptions) -> None:
    from host.ray.applications import run

    run(arguments, _deployment(options), _proxies(options), options.per_model)


def _proxies(options: RayOptions) -> Any:
    from host.ray.serve_config import Proxies

    return Proxies(options.address, options.http_port, options.grpc_port)
