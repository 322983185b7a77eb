"""`pbhost crashes`: shows the records of stubs that died."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

import msgspec

from host.cli.arguments import errors_end, format_flag, parse_texts, to_json
from host.cli.server_client import ConnectionOptions, ServerClient
from host.crashes.quarantine import QuarantinedRequest
from host.crashes.records import (
    CrashRecord,
    CrashSummary,
    DescribedRequest,
    read_records,
    summarize,
    tensor_folder,
)
from host.errors import invalid_argument, not_found
from host.logs.formats import escape_control_characters, format_table
from host.options.flags import SWITCH, FlagGroup

_NEWEST = "newest"

_ABOUT = """\
Lists the records of processes of models that died: what ended them, what they ran, their Python
stacks, and the last lines that they printed.

URL is the address of a running server's HTTP port, by default http://localhost:8000; DIRECTORY is
that which a server was given with --crash-directory.

examples:
  pbhost crashes
  pbhost crashes http://localhost:8000 --show=newest
  pbhost crashes /var/lib/pbhost/crashes --model=resnet
  pbhost crashes http://localhost:8000 --lift --model=resnet

exit status: 0 the records were read; 1 they cannot be read, or there is no such record; 2 the
command line is invalid"""

_group = FlagGroup("Crashes")


@dataclass
class CrashesOptions(ConnectionOptions):
    """The flags of `pbhost crashes`."""

    show: str = _group("", f"Id of the record to show; '{_NEWEST}' for the newest one.")
    model: str = _group("", "Show only records of this model.")
    lift: bool = _group(
        False,
        "Accept requests again that the server refuses because they ended processes: those of all"
        " models, or of --model.",
        SWITCH,
    )
    format: str = format_flag(_group)


def main(arguments: Sequence[str]) -> NoReturn:
    """Prints the records and exits."""
    (source,), options = parse_texts(arguments, "crashes [URL|DIRECTORY]", _ABOUT, CrashesOptions)
    remote = source.startswith(("http://", "https://"))
    with errors_end("crashes"):
        records = _Server(ServerClient(source, options)) if remote else _Directory(Path(source))
        if options.lift:
            text = _lift_quarantine(records, options.model)
        else:
            text = _describe(records, options)
        sys.stdout.write(text)
    sys.exit(0)


def _describe(records: _Server | _Directory, options: CrashesOptions) -> str:
    """The text to print. Raises HostError."""
    as_json = options.format == "json"
    if options.show and options.show != _NEWEST:
        record = records.find(options.show)
        return to_json(record) if as_json else _format_record(record)
    found = [one for one in records.list() if options.model in ("", one.model)]
    if options.show:
        if not found:
            raise not_found("there is no record of a crash")
        record = records.find(found[0].id)
        return to_json(record) if as_json else _format_record(record)
    refused = [one for one in records.list_quarantined() if options.model in ("", one.model)]
    if as_json:
        return to_json({"crashes": found, "quarantine": refused})
    if not found:
        return "no crash\n"
    rows = [(one.time, one.model, str(one.version), one.reason, one.id) for one in found]
    table = format_table(["Time", "Model", "Version", "Reason", "Id"], rows).lstrip("\n")
    return table + "".join(map(_format_quarantined, refused))


def _format_quarantined(refused: QuarantinedRequest) -> str:
    (request,) = format_requests([refused.request])
    text = (
        f"requests like this to model '{refused.model}' version {refused.version} are refused until"
        f" {refused.until}, see {', '.join(refused.crashes)}:\n{request}"
    )
    return "".join(f"{escape_control_characters(line)}\n" for line in text.split("\n"))


def _lift_quarantine(records: _Server | _Directory, model: str) -> str:
    """Accepts the requests of a model, or of all, again. Raises HostError."""
    if isinstance(records, _Directory):
        raise invalid_argument("--lift needs the address of a server (http://HOST:PORT)")
    count = records.lift_quarantine(model)
    return f"{count} request{'s' if count != 1 else ''} accepted again\n"


class _Directory:
    """The records in a directory. Raises HostError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise not_found(
                f"'{path}' is neither a directory nor the address of a server (http://HOST:PORT)"
            )
        self._records = {record.id: record for record in reversed(read_records(path))}

    def list(self) -> list[CrashSummary]:
        """All records, the newest first."""
        return [summarize(record) for record in self._records.values()]

    def find(self, identifier: str) -> CrashRecord:
        """One record. Raises HostError NOT_FOUND."""
        if identifier not in self._records:
            raise not_found(f"there is no record of a crash '{identifier}'")
        return self._records[identifier]

    def list_quarantined(self) -> Sequence[QuarantinedRequest]:
        """None: only a running server refuses requests."""
        return []


class _Server:
    """The records of a running server."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    def list(self) -> list[CrashSummary]:
        """All records, the newest first. Raises HostError."""
        return self._client.read("/v2/crashes", _List).crashes

    def find(self, identifier: str) -> CrashRecord:
        """One record. Raises HostError."""
        path = f"/v2/crashes/{quote(identifier, safe='')}"
        return self._client.read(path, CrashRecord)

    def list_quarantined(self) -> Sequence[QuarantinedRequest]:
        """The requests that the server refuses. Raises HostError."""
        return self._client.read("/v2/quarantine", _Quarantine).requests

    def lift_quarantine(self, model: str) -> int:
        """Returns how many requests are accepted again. Raises HostError."""
        body = msgspec.json.encode({"model": model})
        return self._client.read("/v2/quarantine/lift", _Lifted, body).lifted


class _List(msgspec.Struct):
    crashes: list[CrashSummary]


class _Quarantine(msgspec.Struct):
    requests: list[QuarantinedRequest]


class _Lifted(msgspec.Struct):
    lifted: int


def format_requests(requests: Iterable[DescribedRequest]) -> Iterator[str]:
    """A line for each request, with its id and its inputs."""
    for request in requests:
        inputs = ", ".join(f"{t.name} {t.datatype} {t.shape}" for t in request.inputs)
        yield f"  id '{request.id}': {inputs or 'no inputs'}"


def _format_record(record: CrashRecord) -> str:
    version = f"{record.model}:{record.version}"
    lines = [
        f"crash {record.id}",
        f"  time    {record.time}",
        f"  model   {version}, instance {record.instance}, process {record.pid}",
        f"  reason  {record.reason}",
        f"  during  {record.phase}",
    ]
    if record.request_count:
        lines.append(f"requests that ran: {record.request_count}")
    lines += format_requests(record.requests)
    if record.recorded_requests:
        lines.append(
            f"tensors of {record.recorded_requests} requests, in the directory of the records:"
            f" pbhost replay {tensor_folder(Path(), record.id)} --against=URL"
        )
    for title, texts in (("Python stacks:", record.stacks), ("last output:", record.output)):
        if texts:
            lines += [title, *(f"  {text}" for text in texts)]
    return "\n".join(escape_control_characters(line) for line in lines) + "\n"
