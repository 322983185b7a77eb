"""The types of the flags of `pbhost.bind.Host`, in host/bind/host_flags.py.

`python -m tests.host_flags` writes them again, from the flags of `pbhost serve`.
"""

from __future__ import annotations

from pathlib import Path

from host.options.flags import SWITCH, Flag, Status
from host.options.server_flags import FLAGS

MODULE = Path(__file__).resolve().parents[1] / "host" / "bind" / "host_flags.py"
HEAD = '''\
"""The types of the flags of a host; `python -m tests.host_flags` writes this module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class HostFlags(TypedDict, total=False):
    """The flags of `pbhost serve`, which the command line describes; None is the default."""

'''
TYPES = {bool: "bool", int: "int", float: "float", str: "str"}


def type_of(flag: Flag) -> str:
    """The type of the values of a flag."""
    if flag.kind.add is not None:
        return "str | Sequence[str]"
    if flag.kind.word == "bytes":
        return "int | str"
    return TYPES[type(flag.default)]


def module() -> str:
    """The text of the module."""
    fields = [
        f"    {flag.name.replace('-', '_')}: {type_of(flag)} | None\n"
        for flag in FLAGS
        if flag.status is not Status.REFUSED
        and flag.kind is not SWITCH
        and flag.field != "model_repository"
    ]
    return HEAD + "".join(fields)


def main() -> None:
    """Writes the module."""
    MODULE.write_text(module())


if __name__ == "__main__":
    main()
