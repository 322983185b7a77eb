"""TLS certificates and keys, read from files."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from host.errors import HostError, invalid_argument

_log = logging.getLogger("pbhost")
_WATCH_SECONDS = 5.0

FileState = tuple[tuple[int, int, int] | None, ...]
"""Modification time in ns, inode and size of each file; None for one that cannot be found."""


@dataclass(frozen=True, slots=True)
class TlsContents:
    """What TLS files contained at one moment, in PEM form; no root certificate: not mutual.

    A rotation of certificates may change the files at any time. What is used must be what was
    checked, or a context might get a new certificate without its key.
    """

    server_cert: bytes
    server_key: bytes
    root_cert: bytes | None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files, as given by the flags `--<endpoint>-server-cert` and so on.

    `mutual`: clients need a certificate that `root_cert` has signed.
    """

    endpoint: str
    server_cert: str
    server_key: str
    root_cert: str
    mutual: bool

    def read(self) -> TlsContents:
        """Returns what the files contain. Blocks.

        Raises HostError INVALID_ARG, which names the flag, if a file cannot be read.
        """
        return TlsContents(
            self.read_file("server-cert"),
            self.read_file("server-key"),
            self.read_file("root-cert") if self.mutual else None,
        )

    def create_context(self, contents: TlsContents | None = None) -> ssl.SSLContext:
        """Returns the TLS context of a server with `contents`, or with what `read` returns. Blocks.

        Raises HostError INVALID_ARG, which names the flag, if a file cannot be used.
        """
        contents = contents or self.read()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            self._load(context, contents)
        except OSError as error:  # no defect of the files: too many are open, for example
            raise self._file_error(
                f"a copy in memory cannot be read: {error.strerror}", "server-cert"
            ) from None
        return context

    def state(self) -> FileState:
        """Returns what changes with the files. Blocks."""
        return tuple(
            _file_state(path) for path in (self.server_cert, self.server_key, self.root_cert)
        )

    def _load(self, context: ssl.SSLContext, contents: TlsContents) -> None:
        try:
            with _file_in_memory(contents.server_cert) as cert:
                with _file_in_memory(contents.server_key) as key:
                    # Without a password, OpenSSL would ask for one at the terminal.
                    context.load_cert_chain(cert, key, password=lambda: b"")
        except (ssl.SSLError, ValueError) as error:
            raise self._file_error(
                f"'{self.server_cert}' and {self._flag_name('server-key')} '{self.server_key}' are"
                " not a matching certificate and key in PEM form without a password:"
                f" {_openssl_reason(error)}",
                "server-cert",
            ) from None
        if contents.root_cert is None:
            return
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            with _file_in_memory(contents.root_cert) as root:
                context.load_verify_locations(root)
        except ssl.SSLError as error:
            raise self._file_error(
                f"'{self.root_cert}' contains no certificates in PEM form:"
                f" {_openssl_reason(error)}",
                "root-cert",
            ) from None

    def read_file(self, name: str) -> bytes:
        """Returns the content of the file `server-cert`, `server-key` or `root-cert`. Blocks.

        Raises HostError INVALID_ARG if the file cannot be read or no path was given.
        """
        path = getattr(self, name.replace("-", "_"))
        if not path:
            raise self._file_error("TLS needs a PEM file, but no path is given", name)
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise self._file_error(f"'{path}' cannot be read: {error.strerror}", name) from None

    def read_file_or_empty(self, name: str) -> bytes:
        """Returns the content of a file, or nothing if the file cannot be read. Blocks."""
        try:
            return self.read_file(name)
        except HostError as error:
            _log.warning("%s; treating it as empty", error.message)
            return b""

    def _flag_name(self, name: str) -> str:
        return f"--{self.endpoint}-{name}"

    def _file_error(self, what: str, name: str) -> HostError:
        return invalid_argument(f"{self._flag_name(name)}: {what}")


class ServerTls:
    """TLS of an endpoint, whose files can be read again while it serves."""

    def __init__(self, files: TlsFiles, protocols: Sequence[str] = ()) -> None:
        """Reads the files. Blocks. Raises HostError INVALID_ARG if a file cannot be used.

        `protocols`: those of ALPN (RFC 7301), for example `h2`; without any, all are accepted.
        """
        self.files = files
        self._protocols = protocols
        self.context = self._newest = self._create_context()
        """For the listening socket: each handshake takes what was read last."""
        # It is called for each handshake, also if the client sends no name of a server.
        self.context.sni_callback = self._take_newest

    def reload(self) -> None:
        """Reads the files again, for new connections. Blocks.

        Raises HostError INVALID_ARG, without a change, if a file cannot be used.
        """
        self._newest = self._create_context()

    def _create_context(self) -> ssl.SSLContext:
        context = self.files.create_context()
        if self._protocols:
            context.set_alpn_protocols(self._protocols)
        return context

    def _take_newest(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._newest


class TlsReloader:
    """Reads TLS files again: soon after they have changed, and when told to.

    Belongs to the event loop. `watches`: otherwise only when told to, and it logs errors alone.
    """

    def __init__(self, watches: bool = True) -> None:
        self._watches = watches
        self._files: dict[TlsFiles, Callable[[], None]] = {}
        self._states: dict[TlsFiles, FileState] = {}
        self._watching: asyncio.Task[None] | None = None

    async def add(self, files: TlsFiles, reload: Callable[[], None]) -> None:
        """Watches the files of an endpoint; `reload` blocks and may raise HostError."""
        self._files[files] = reload
        self._states[files] = await asyncio.to_thread(files.state)
        if self._watching is None and self._watches:
            self._watching = asyncio.create_task(self._watch())

    async def reload(self) -> None:
        """Reads the files of all endpoints. A file that cannot be used leaves the old ones."""
        for files, reload in list(self._files.items()):
            await self._reload(files, reload)

    async def close(self) -> None:
        """Ends the watch."""
        self._files.clear()
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            for files, reload in list(self._files.items()):
                if await asyncio.to_thread(files.state) != self._states[files]:
                    await self._reload(files, reload)

    async def _reload(self, files: TlsFiles, reload: Callable[[], None]) -> None:
        # The state comes first: a change while the files are read is seen by the next check.
        self._states[files] = await asyncio.to_thread(files.state)
        try:
            await asyncio.to_thread(reload)
        except HostError as error:
            _log.error("%s; the files that were read before stay in use", error.message)
        else:
            if self._watches:
                _log.info("Read the TLS files of %s again", files.endpoint)


def _file_state(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


@contextmanager
def _file_in_memory(content: bytes) -> Iterator[str]:
    """The path of a file that only this process has: OpenSSL reads keys from paths alone."""
    with open(os.memfd_create("pbhost-tls"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _openssl_reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error) or "OpenSSL does not say why"
