"""`pbhost stacks`: shows what the instances of a running server do now."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import quote

import msgspec

from host.cli.arguments import errors_end, format_flag, parse_texts, to_json
from host.cli.crashes import format_requests
from host.cli.server_client import ConnectionOptions, ServerClient
from host.instances.activity import InstanceActivity
from host.logs.formats import escape_control_characters
from host.options.flags import FlagGroup

_ABOUT = """\
Shows what each instance of a running server does now: the requests that it runs, and the Python
stacks of all its threads. URL is the address of the server's HTTP port, by
default http://localhost:8000.

A process that is stopped, or whose native code holds the lock of the Python interpreter, cannot
answer; the output says so.

examples:
  pbhost stacks
  pbhost stacks http://localhost:8000 --model=resnet

exit status: 0 the server has answered; 1 it has not, or has no such model; 2 the command line is
invalid"""

_group = FlagGroup("Stacks")


@dataclass
class StacksOptions(ConnectionOptions):
    """The flags of `pbhost stacks`."""

    model: str = _group("", "Show only instances of this model.")
    format: str = format_flag(_group)


class _Answer(msgspec.Struct):
    instances: list[InstanceActivity]


def main(arguments: Sequence[str]) -> NoReturn:
    """Prints what the instances do and exits."""
    (url,), options = parse_texts(arguments, "stacks [URL]", _ABOUT, StacksOptions)
    path = f"/v2/models/{quote(options.model, safe='')}/stacks" if options.model else "/v2/stacks"
    with errors_end("stacks"):
        answer = ServerClient(url, options).read(path, _Answer)
    if options.format == "json":
        sys.stdout.write(to_json(answer))
        sys.exit(0)
    texts = [_format_activity(instance) for instance in answer.instances]
    sys.stdout.write("\n".join(texts) or "no instance\n")
    sys.exit(0)


def _format_activity(activity: InstanceActivity) -> str:
    model = f"{activity.model}:{activity.version}" if activity.version else activity.model
    process = f"instance {activity.instance}, process {activity.pid}"
    lines = [f"{model}, {process}: {activity.phase}"]
    if activity.request_count:
        lines.append(f"requests: {activity.request_count}")
    lines += format_requests(activity.requests)
    lines += [f"  {line}" for line in activity.stacks]
    if activity.problem:
        lines.append(f"  {activity.problem}")
    return "\n".join(escape_control_characters(line) for line in lines) + "\n"
