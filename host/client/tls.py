"""The certificates of clients that connect with TLS."""

from __future__ import annotations

import ssl
from pathlib import Path

from host.errors import invalid_argument


def read_tls(ca_file: str, certificate_file: str, key_file: str) -> ssl.SSLContext:
    """Returns the settings of connections; the machine's authorities without a `ca_file`.

    Raises HostError INVALID_ARG for files that cannot be used.
    """
    trusted = read_file(ca_file)
    read_file(key_file)  # for an error that names the file
    read_file(certificate_file)
    try:
        tls = ssl.create_default_context(cadata=trusted.decode() if trusted else None)
        if certificate_file:
            tls.load_cert_chain(certificate_file, key_file)
    except (ssl.SSLError, ValueError) as error:
        files = ", ".join(filter(None, (ca_file, certificate_file, key_file)))
        raise invalid_argument(f"cannot use the certificates of {files}: {error}") from error
    return tls


def read_file(path: str) -> bytes | None:
    """Returns the content of a file; None without a path. Raises HostError INVALID_ARG."""
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise invalid_argument(f"cannot read '{path}': {error.strerror}") from error
