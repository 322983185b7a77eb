"""The arguments of an application: the flags of `pbhost serve`, with `_` instead of `-`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from host.options.command_line import parse
from host.options.flags import SWITCH
from host.options.options import Options, UsageError
from host.options.server_flags import FLAGS

_SWITCHES = {flag.field for flag in FLAGS if flag.kind is SWITCH}
_DEFAULTS = {
    "allow_grpc": False,
    "allow_http": False,
    "allow_metrics": False,
    "busy_poll": False,  # replicas share CPUs, and Ray's threads share the interpreter of each
}


def read_options(arguments: Mapping[str, Any]) -> Options:
    """The options of a server without ports and busy polling, unless the arguments say otherwise.

    Raises ValueError, also for options that cannot work in one of several replicas.
    """
    flags = [
        flag
        for name, value in {**_DEFAULTS, **arguments}.items()
        for one in (value if isinstance(value, (list, tuple)) else [value])
        for flag in _flag(name, one)
    ]
    try:
        options = parse(flags)
    except UsageError as error:
        raise ValueError(f"{error.detail.strip()} {error.advice.strip()}".strip()) from None
    _check(options)
    return options


def _flag(name: str, value: object) -> list[str]:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if name in _SWITCHES:
        return [f"--{name.replace('_', '-')}"] if text == "true" else []
    return [f"--{name.replace('_', '-')}={text}"]


def _check(options: Options) -> None:
    if options.allow_client_shm:
        raise ValueError(
            "allow_client_shm: clients of a Ray cluster reach any replica, on any node, and shared"
            " memory belongs to one machine; send tensors in the requests"
        )
    if options.cache_settings is not None and options.cache_settings[0] == "local":
        raise ValueError(
            "cache_config: each replica would have a local cache of its own, with other contents;"
            " use a Redis server: cache_config=redis,host=HOST"
        )
    if options.frontend_count:
        raise ValueError(
            "frontend_processes: the proxies of Ray Serve take their place; leave it out"
        )
    if options.debug_model or options.dev:
        raise ValueError("dev and debug_model need a terminal, and a replica has none")
