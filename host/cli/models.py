"""`pbhost models`: lists, loads and unloads the models of a running server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import quote

import msgspec

from host.cli.arguments import errors_end, fail_misuse, parse_texts, to_json
from host.cli.server_client import ConnectionOptions, ServerClient, check_timeout
from host.logs.formats import escape_control_characters, format_table
from host.options.flags import SWITCH, FlagGroup, InvalidValue, one_of

_INDEX = "/v2/repository/index"

_ABOUT = """\
Lists, loads or unloads models of a running server. URL is the address of the server's HTTP port, by
default http://localhost:8000. Loads and unloads need --model-control-mode=explicit or on-demand.

  list    prints each version in the repository, with its state; MODEL selects some
  load    loads or reloads each MODEL
  unload  unloads each MODEL

examples:
  pbhost models list
  pbhost models load add_sub
  pbhost models http://models.example:8000 unload add_sub --unload-dependents
  pbhost models list --format=json

exit status: 0 success; 1 the server does not answer, or refuses; 2 the command line is invalid"""


_group = FlagGroup("Models")


@dataclass
class ModelsOptions(ConnectionOptions):
    """The flags of `pbhost models`."""

    unload_dependents: bool = _group(
        False, "Unload the models of an ensemble with it, if no other one uses them.", SWITCH
    )
    timeout: float = _group(600.0, "Seconds to wait for each model.", check=check_timeout)
    format: str = _group(
        "text", "Output format of list: text or json.", check=one_of("format", "text", "json")
    )


class _ModelVersion(msgspec.Struct, omit_defaults=True):
    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


def main(arguments: Sequence[str]) -> NoReturn:
    """Does what the command says and exits."""
    (url, action, *names), options = parse_texts(
        arguments, "models [URL] list|load|unload [MODEL] ...", _ABOUT, ModelsOptions
    )
    actions = {"list": _list, "load": _load, "unload": _unload}
    if action not in actions:
        fail_misuse("models", InvalidValue(f"expected list, load or unload, got '{action}'"))
    if not names and action != "list":
        fail_misuse("models", InvalidValue("the following arguments are required: MODEL"))
    with errors_end("models"):
        actions[action](ServerClient(url, options, options.timeout), names, options)
    sys.exit(0)


def _list(client: ServerClient, names: Sequence[str], options: ModelsOptions) -> None:
    found = client.read(_INDEX, list[_ModelVersion], b"{}")
    chosen = [model for model in found if not names or model.name in names]
    if options.format == "json":
        sys.stdout.write(to_json([msgspec.structs.asdict(model) for model in chosen]))
        return
    rows = [
        tuple(map(escape_control_characters, (one.name, one.version, one.state, one.reason)))
        for one in chosen
    ]
    heads = ["Model", "Version", "State", "Reason"]
    sys.stdout.write(format_table(heads, rows).lstrip("\n") if rows else "no model\n")


def _load(client: ServerClient, names: Sequence[str], options: ModelsOptions) -> None:
    for name in names:
        client.post(f"/v2/repository/models/{quote(name, safe='')}/load", b"{}", {})
        sys.stdout.write(f"loaded {escape_control_characters(name)}\n")


def _unload(client: ServerClient, names: Sequence[str], options: ModelsOptions) -> None:
    parameters = {"parameters": {"unload_dependents": options.unload_dependents}}
    for name in names:
        path = f"/v2/repository/models/{quote(name, safe='')}/unload"
        client.post(path, msgspec.json.encode(parameters), {})
        sys.stdout.write(f"unloaded {escape_control_characters(name)}\n")
