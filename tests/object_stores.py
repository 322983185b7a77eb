"""Servers of object stores for tests: S3 by moto, whose requests are recorded and may be spoilt."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.conftest import DEADLINE

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Fault = Callable[[dict[str, Any], Callable[..., Any], Application], Iterable[bytes] | None]
"""Answers a request instead of the store; None leaves it to the store."""

BUCKET = "models-of-tests"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class S3Server:
    """moto's server of S3 with one bucket; the requests of tests are signed with the keys below.

    Attributes:
        requests: The requests so far: method, and path with query.
        fault: Spoils requests; None if there is no fault.
    """

    def __init__(self, bucket: str = BUCKET) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.bucket = bucket
        self.requests: list[str] = []
        self.fault: Fault | None = None
        self._application: Application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._respond, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.port}"
        self._send("PUT", "")

    def _respond(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        query = environ["QUERY_STRING"]
        path = environ["PATH_INFO"] + (f"?{query}" if query else "")
        self.requests.append(f"{environ['REQUEST_METHOD']} {path}")
        if self.fault is not None:
            spoilt = self.fault(environ, start, self._application)
            if spoilt is not None:
                return spoilt
        return self._application(environ, start)

    def url(self, prefix: str) -> str:
        """The URL of a repository in the bucket."""
        return f"s3://{self.endpoint}/{self.bucket}/{prefix}"

    def _send(
        self,
        method: str,
        key: str,
        content: bytes | None = None,
        more: Mapping[str, str] | None = None,
    ) -> None:
        headers = {
            **(more or {}),
            "Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/x",
            "Content-Type": "application/octet-stream",
        }
        url = f"{self.endpoint}/{self.bucket}/{key}"
        with urlopen(Request(url, content, headers, method=method), timeout=DEADLINE):
            pass

    def put(self, key: str, content: bytes | str, headers: Mapping[str, str] | None = None) -> None:
        """Writes an object."""
        data = content.encode() if isinstance(content, str) else content
        self._send("PUT", key, data, headers)

    def delete(self, key: str) -> None:
        """Removes an object."""
        self._send("DELETE", key)

    def put_files(self, prefix: str, files: Mapping[str, bytes | str]) -> None:
        """Writes objects by their keys below the prefix."""
        for key, content in files.items():
            self.put(f"{prefix}/{key}", content)

    def put_folder(self, prefix: str, folder: Path) -> None:
        """Writes the files of a folder."""
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    def objects_read(self) -> list[str]:
        """The keys of the objects that were read so far; clears the list of requests."""
        requests, self.requests = self.requests, []
        start = f"GET /{self.bucket}/"
        return [one[len(start) :] for one in requests if one.startswith(start) and "?" not in one]

    def close(self) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._thread.join(DEADLINE)
        self._server.server_close()
