"""TLS certificates and keys, read from files."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from host.errors import HostError, invalid_argument

_log = logging.getLogger("pbhost")


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

    def create_context(self) -> ssl.SSLContext:
        """Returns the TLS context of a server. Blocks.

        Raises HostError INVALID_ARG, which names the flag, if a file cannot be used.
        """
        for name in ("server-cert", "server-key", *(["root-cert"] if self.mutual else [])):
            self.read_file(name)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # Without a password, OpenSSL would ask for one at the terminal.
            context.load_cert_chain(self.server_cert, self.server_key, password=lambda: b"")
        except (ssl.SSLError, ValueError) as error:
            raise self._file_error(
                f"'{self.server_cert}' and {self._flag_name('server-key')} '{self.server_key}' are"
                " not a matching certificate and key in PEM form without a password:"
                f" {_openssl_reason(error)}",
                "server-cert",
            ) from None
        if self.mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.root_cert)
            except ssl.SSLError as error:
                raise self._file_error(
                    f"'{self.root_cert}' contains no certificates in PEM form:"
                    f" {_openssl_reason(error)}",
                    "root-cert",
                ) from None
        return context

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


def _openssl_reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error) or "OpenSSL does not say why"
