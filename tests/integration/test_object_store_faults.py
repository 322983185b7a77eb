"""Object stores that fail, lie or are changed meanwhile, and names that no file can have."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote
from xml.sax.saxutils import escape

import psutil
import pytest

from host.errors import HostError
from host.repository.fingerprint import Fingerprint
from host.repository.model_directory import ModelDirectory
from host.repository.object_store import mirror as mirror_module
from host.repository.object_store.cache import Lease
from host.repository.object_store.mirror import StoreMirror
from host.repository.open_repository import MirrorSettings, open_repository
from host.repository.repository import Repository
from tests.conftest import DEADLINE
from tests.object_stores import BUCKET, ENVIRONMENT, Application, S3Server

pytest.importorskip("moto.server", reason="needs moto's server (pip install 'moto[server]')")
pytest.importorskip("obstore", reason="needs pbhost[cloud]")

STALL_SECONDS = 1.0
FILES: dict[str, bytes | str] = {"m/config.pbtxt": 'backend: "python"', "m/1/weights": b"w" * 4000}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def prefix(
    s3: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A place of its own in the bucket for each test."""
    s3.objects_read()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    yield re.sub(r"\W", "-", request.node.name)
    s3.fault = None


@asynccontextmanager
async def opened(url: str, cache: Path, limit: int = 0) -> AsyncIterator[StoreMirror]:
    """The mirror of a repository that has been listed."""
    settings = MirrorSettings(cache, limit, parts=4, stall_seconds=STALL_SECONDS)
    repository = open_repository([url], False, settings)
    try:
        await repository.refresh()
        yield repository.mirrors[0]
    finally:
        await repository.close()


def find(mirror: StoreMirror, name: str) -> ModelDirectory:
    """A model as it was listed last. Raises HostError if the listing failed."""
    found = mirror.find(name)
    if found is None:
        mirror.check()
        raise LookupError(name)
    return found


def names(mirror: StoreMirror) -> list[str]:
    return [model.name for model in mirror.models()]


def fingerprint(mirror: StoreMirror, name: str) -> Fingerprint:
    stored = find(mirror, name).stored
    assert stored is not None
    return stored.fingerprint


async def fetch_from(mirror: StoreMirror, name: str) -> Lease:
    """A model in the cache. Raises HostError."""
    stored = find(mirror, name).stored
    assert stored is not None
    fetched, _ = await mirror.fetch(stored)
    return fetched


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def fetch(url: str, cache: Path, name: str = "m", limit: int = 0) -> dict[str, bytes]:
    """The files of a model as they are in the cache. Raises HostError."""

    async def run() -> dict[str, bytes]:
        async with opened(url, cache, limit) as mirror:
            fetched = await fetch_from(mirror, name)
            found = read_files(fetched.path)
            fetched.close()
            return found

    return asyncio.run(run())


def objects_only(spoil: Callable[..., Iterable[bytes] | None], name: str = "weights") -> Any:
    """A fault of the requests that read one object."""

    def fault(
        environ: dict[str, Any], start: Callable[..., Any], store: Application
    ) -> Iterable[bytes] | None:
        if environ["REQUEST_METHOD"] != "GET" or not environ["PATH_INFO"].endswith(name):
            return None
        return spoil(environ, start, store)

    return fault


def status(code: str, body: bytes = b"") -> Callable[..., Iterable[bytes]]:
    """Answers with a status."""

    def spoil(environ: object, start: Callable[..., Any], store: object) -> Iterable[bytes]:
        start(code, [("Content-Length", str(len(body)))])
        return [body]

    return spoil


def once(spoil: Callable[..., Iterable[bytes] | None], times: int = 1) -> Any:
    """A fault that ends."""
    left = threading.Semaphore(times)
    return lambda *request: spoil(*request) if left.acquire(blocking=False) else None


def test_a_store_that_is_overloaded_for_a_moment_is_asked_again(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)
    s3.fault = once(status("503 Slow Down"), times=3)
    assert fetch(s3.url(prefix), tmp_path)["1/weights"] == FILES["m/1/weights"]


def test_a_store_that_stays_overloaded_is_an_error_with_the_object_and_the_cause(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)
    body = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>"
    s3.fault = objects_only(status("503 Slow Down", body))
    with pytest.raises(HostError) as caught:
        fetch(s3.url(prefix), tmp_path)
    url = f"{s3.endpoint}/{BUCKET}/{prefix}/m/1/weights"
    assert caught.value.message == (
        f"failed to read 's3://{url}' within 1 s: GET {url} returned 503 Service Unavailable"
        " (SlowDown: Reduce your request rate)"
    )
    assert len(s3.objects_read()) > 2


def test_a_refused_object_is_not_asked_for_again(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    s3.put_files(prefix, FILES)
    s3.fault = objects_only(status("403 Forbidden"))
    with pytest.raises(HostError, match=r"failed to read 's3://\S+/m/1/weights': GET .* 403 Forb"):
        fetch(s3.url(prefix), tmp_path)
    assert s3.objects_read().count(f"{prefix}/m/1/weights") == 1


def test_an_answer_that_ends_in_the_middle_is_continued(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    content = bytes(range(256)) * (5 << 12)  # 5 MiB: several chunks
    s3.put_files(prefix, {**FILES, "m/1/weights": content})
    ranges: list[str] = []

    def end_early(
        environ: dict[str, Any], start: Callable[..., Any], store: Application
    ) -> Iterable[bytes]:
        ranges.append(environ.get("HTTP_RANGE", ""))
        body = b"".join(store(environ, start))
        return [body[: len(body) // 2]] if len(ranges) < 3 else [body]

    s3.fault = objects_only(end_early)
    assert fetch(s3.url(prefix), tmp_path)["1/weights"] == content
    assert ranges[0] == "" and all(one.startswith("bytes=") for one in ranges[1:])


def test_other_bytes_than_listed_are_an_error(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    s3.put_files(prefix, FILES)

    def lie(environ: dict[str, Any], start: Callable[..., Any], store: Application) -> list[bytes]:
        return [b"".join(store(environ, start))[:-1] + b"x"]

    s3.fault = objects_only(lie)
    with pytest.raises(HostError, match="/m/1/weights' has other bytes than the store lists"):
        fetch(s3.url(prefix), tmp_path)
    s3.fault = None
    assert fetch(s3.url(prefix), tmp_path)["1/weights"] == FILES["m/1/weights"]


def test_the_etag_of_an_object_that_kms_encrypts_is_no_digest(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)
    s3.put(f"{prefix}/m/1/weights", b"plain", {"x-amz-server-side-encryption": "aws:kms"})

    def decrypt(
        environ: dict[str, Any], start: Callable[..., Any], store: Application
    ) -> list[bytes]:
        b"".join(store(environ, start))
        return [b"other"]

    s3.fault = objects_only(decrypt)
    assert fetch(s3.url(prefix), tmp_path)["1/weights"] == b"other"


def test_an_object_that_changes_while_its_model_is_read_is_listed_again(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)

    def change(*request: object) -> None:
        s3.fault = None
        s3.put(f"{prefix}/m/1/weights", b"new")

    s3.fault = objects_only(change)
    assert fetch(s3.url(prefix), tmp_path)["1/weights"] == b"new"


def test_a_slow_store_is_waited_for_as_long_as_bytes_arrive(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    content = bytes(range(256)) * (4 << 12)  # 4 MiB
    s3.put_files(prefix, {**FILES, "m/1/weights": content})
    never = threading.Event()
    ranges: list[str] = []

    def dribble(
        environ: dict[str, Any], start: Callable[..., Any], store: Application
    ) -> Iterator[bytes]:
        ranges.append(environ.get("HTTP_RANGE", ""))
        body = b"".join(store(environ, start))

        def send() -> Iterator[bytes]:
            for at in range(0, len(body), 1 << 20):
                never.wait(0.4 * STALL_SECONDS)
                yield body[at : at + (1 << 20)]

        return send()

    s3.fault = objects_only(dribble)
    assert fetch(s3.url(prefix), tmp_path)["1/weights"] == content
    assert ranges == [""], "it was asked for once"


def test_a_store_that_sends_another_object_than_it_lists_is_an_error(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)

    def send_other(environ: object, start: Callable[..., Any], store: object) -> list[bytes]:
        date = "Thu, 01 Jan 2026 00:00:00 GMT"
        start("200 OK", [("ETag", '"other"'), ("Last-Modified", date), ("Content-Length", "4000")])
        return [b"x" * 4000]

    s3.fault = objects_only(send_other)
    with pytest.raises(HostError, match="/m/1/weights' has changed since it was listed"):
        fetch(s3.url(prefix), tmp_path)
    assert not any(path.is_file() for path in tmp_path.glob("*/*/m/*"))


def test_an_object_that_is_removed_while_its_model_is_read_is_listed_again(
    s3: S3Server, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    s3.put_files(prefix, FILES)

    def remove(*request: object) -> None:
        s3.fault = None
        s3.delete(f"{prefix}/m/1/weights")

    s3.fault = objects_only(remove)
    assert set(fetch(s3.url(prefix), tmp_path)) == {"config.pbtxt"}
    assert re.search("failed to read '.*/m/1/weights': it no longer exists", caplog.text)


def test_an_object_that_always_changes_is_an_error(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)
    s3.fault = objects_only(status("412 Precondition Failed"))
    with pytest.raises(HostError, match="/m/1/weights': it has changed since it was listed"):
        fetch(s3.url(prefix), tmp_path)


def test_a_silent_store_is_an_error_after_the_timeout(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)
    released = threading.Event()

    def wait(*request: object) -> Iterable[bytes]:
        released.wait(30)
        return status("503 Slow Down")(*request)

    s3.fault = objects_only(wait)
    try:
        with pytest.raises(HostError, match=r"failed to read 's3://\S+weights' within 1 s: .*time"):
            fetch(s3.url(prefix), tmp_path)
    finally:
        released.set()


def test_a_store_that_is_not_there_is_an_error(prefix: str, tmp_path: Path) -> None:
    async def check() -> None:
        async with opened("s3://http://127.0.0.1:1/bucket", tmp_path) as mirror:
            mirror.check()

    with pytest.raises(HostError, match=r"failed to list 's3://http://127.0.0.1:1/bucket' within"):
        asyncio.run(check())


def listing(keys: Sequence[str], size: int = 0) -> Callable[..., Iterable[bytes]]:
    """A listing of the store with these keys, in pages of 1000."""

    def spoil(environ: dict[str, Any], start: Callable[..., Any], store: object) -> list[bytes]:
        query = environ["QUERY_STRING"]
        page = int(query.partition("continuation-token=")[2].split("&")[0] or 0)
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>&quot;e&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in keys[page * 1000 : (page + 1) * 1000]
        )
        more = (page + 1) * 1000 < len(keys)
        token = f"<NextContinuationToken>{page + 1}</NextContinuationToken>" if more else ""
        body = (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            f"{entries}</ListBucketResult>"
        ).encode()
        start("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    return spoil


def list_fault(keys: Sequence[str], size: int = 0) -> Any:
    """Lists these keys instead of those of the store."""
    listed = listing(keys, size)
    return lambda environ, *rest: (
        listed(environ, *rest) if "list-type" in environ["QUERY_STRING"] else None
    )


def test_keys_that_no_file_can_have_are_left_out(
    s3: S3Server, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = ["m/../../../evil", "m/./1/x", "../evil", "/etc/evil", "m/1//evil", "m/\x07", "/m/1/x"]
    s3.put_files(prefix, {**FILES, "m/1/a%20b%2Bc%2525": "odd", "m/2/": ""})
    as_usual = fetch(s3.url(prefix), tmp_path / "usual")
    s3.put_files(prefix, {quote(key): "evil" for key in odd})
    cache = tmp_path / "a" / "cache"
    s3.requests.clear()

    async def check() -> None:
        async with opened(s3.url(prefix), cache) as mirror:
            await mirror.refresh()
            refused = [one for one in s3.requests if "list-type" in one and "x-end=" not in one]
            assert len(refused) == 1, "what the library refuses is not asked for again"
            assert names(mirror) == ["m"]
            assert read_files((await fetch_from(mirror, "m")).path) == as_usual
            await mirror.refresh("m")

    asyncio.run(check())
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]
    for key in odd:
        name = f"{s3.url(prefix)}/{key}"
        assert caplog.text.count(f"ignore {name!r}, which no file can be named") == 1, key


@pytest.mark.parametrize(
    ("keys", "size", "cause"),
    [
        (["m/1", "m/1/x"], 3, r"/m/1' is both an object and a folder of other objects"),
        (["m/1/" + 300 * "n"], 3, "has a longer name than a file can have"),
        (["m/config.pbtxt"], 1 << 40, "too many for a configuration file"),
        (["config.pbtxt", "1/model.py"], 3, "is a model, expected a model repository"),
        (["m/1/weights"], 1 << 60, "no room for 1152921504606846976 bytes"),
    ],
)
def test_objects_that_cannot_be_a_model_say_why(
    s3: S3Server, prefix: str, tmp_path: Path, keys: list[str], size: int, cause: str
) -> None:
    s3.fault = list_fault([f"{prefix}/{key}" for key in keys], size)
    with pytest.raises(HostError, match=cause):
        fetch(s3.url(prefix), tmp_path)


def test_odd_names_are_kept(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    files = {
        "m/1/Model.py": "upper",
        "m/1/model.py": "lower",
        "m/1/a b%2F..%5c\\ü'\"$(x)": "odd",
        "m/1/empty": "",
        "m/2/": "",  # marks a folder
        "m/__pycache__/x.pyc": "of no interest",
    }
    s3.put_files(prefix, {quote(key): content for key, content in files.items()})
    found = fetch(s3.url(prefix), tmp_path)
    assert found == {key[2:]: files[key].encode() for key in files if "m/1/" in key}
    (made,) = tmp_path.glob("*-m/*/m/2")
    assert made.is_dir()


@pytest.mark.parametrize(
    ("count", "refused"),
    [
        (1_100, False),  # a page has 1,000
        (1_100, True),
        pytest.param(10_000, False, marks=pytest.mark.test_all(reason="makes 30,000 files")),
    ],
)
def test_thousands_of_objects_are_listed_in_pages(
    s3: S3Server, prefix: str, tmp_path: Path, count: int, refused: bool
) -> None:
    keys = [f"{prefix}/m/1/{number}" for number in range(count)]
    s3.fault = list_fault([f"{prefix}/m//refused", *keys] if refused else keys)

    async def count_files() -> int:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            fetched = await fetch_from(mirror, "m")  # empty objects are not read
            return len(read_files(fetched.path))

    assert asyncio.run(count_files()) == count
    assert s3.objects_read() == []


@pytest.mark.parametrize("odd", [False, True])
def test_a_bucket_at_the_server_of_a_variable_is_read(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: bool
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    s3.put_files(prefix, {**FILES, **({quote("m//odd"): ""} if odd else {})})
    found = fetch(f"s3://{s3.bucket}/{prefix}", tmp_path)
    assert found["1/weights"] == FILES["m/1/weights"]


@pytest.mark.parametrize("spoilt", ["cut", "no XML", "no size"])
def test_a_listing_with_odd_keys_that_is_cut_is_read_again(
    s3: S3Server, prefix: str, tmp_path: Path, spoilt: str
) -> None:
    s3.put_files(prefix, {**FILES, quote("m//odd"): ""})
    spoilt_queries: list[str] = []

    def spoil(
        environ: dict[str, Any], start: Callable[..., Any], store: Application
    ) -> list[bytes] | None:
        query = environ["QUERY_STRING"]
        if "x-end=" not in query or spoilt_queries:
            return None
        spoilt_queries.append(query)
        if spoilt == "cut":
            return [b"".join(store(environ, start))[:100]]
        start("200 OK", [])
        if spoilt == "no XML":
            return [b"<html><p>Try again"]
        return [b"<ListBucketResult><Contents><Key>m/1/x</Key></Contents></ListBucketResult>"]

    s3.fault = spoil
    assert fetch(s3.url(prefix), tmp_path)["1/weights"] == FILES["m/1/weights"]
    assert spoilt_queries


def test_keys_are_decoded_only_if_the_store_encodes_them(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.fault = list_fault([f"{prefix}/m//odd", f"{prefix}/m/1/a+b%41"])
    assert fetch(s3.url(prefix), tmp_path) == {"1/a+b%41": b""}


def run_both(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    async def run() -> list[Any]:
        return await asyncio.gather(*work)

    return asyncio.run(run())


def test_two_servers_that_fetch_the_same_model_read_it_once(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)

    async def fetch_one() -> dict[str, bytes]:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            fetched = await fetch_from(mirror, "m")
            return read_files(fetched.path)

    one, other = run_both([fetch_one(), fetch_one()])
    assert one == other and one["1/weights"] == FILES["m/1/weights"]
    assert s3.objects_read().count(f"{prefix}/m/1/weights") == 1


def test_a_cancelled_fetch_ends_its_use_of_the_cache(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_files(prefix, FILES)
    as_usual = os.utime
    entered, cancelled = threading.Event(), threading.Event()

    def wait_for_cancellation(file: int) -> None:
        """The last step of a lease, in its thread."""
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            assert cancelled.wait(DEADLINE)
        as_usual(file)

    async def check() -> None:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            (await fetch_from(mirror, "m")).close()
            monkeypatch.setattr(os, "utime", wait_for_cancellation)
            fetching = asyncio.create_task(fetch_from(mirror, "m"))
            assert await asyncio.to_thread(entered.wait, DEADLINE)
            fetching.cancel()
            asyncio.get_running_loop().call_soon(cancelled.set)
            with pytest.raises(asyncio.CancelledError):
                await fetching

    asyncio.run(check())
    used = [file.path for file in psutil.Process().open_files()]
    assert not [path for path in used if path.startswith(str(tmp_path))]


def cached(folder: Path) -> set[str]:
    """The models in the cache."""
    return {path.name for path in folder.glob("*/*/?")}


def test_the_least_recently_used_models_make_room(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    for name in "abc":
        s3.put(f"{prefix}/{name}/1/x", name.encode() * 1000)
    limit = 2500

    async def fetch_all() -> None:
        async with opened(s3.url(prefix), tmp_path, limit) as mirror:
            used = await fetch_from(mirror, "a")
            (await fetch_from(mirror, "b")).close()
            (await fetch_from(mirror, "c")).close()  # b makes room, as a is used
            assert cached(tmp_path) == {"a", "c"}
            second = await fetch_from(mirror, "c")
            with pytest.raises(HostError, match="no room for 1000 bytes in .* of the 2500 of"):
                await fetch_from(mirror, "b")
            used.close()
            (await fetch_from(mirror, "b")).close()
            second.close()
            assert cached(tmp_path) == {"b", "c"}

    asyncio.run(fetch_all())


def incomplete(cache: Path) -> set[Path]:
    """The files that are being fetched."""
    return set(cache.glob("*/objects/*.new"))


def test_a_configuration_that_cannot_be_kept_in_the_cache_is_still_read(
    s3: S3Server, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    s3.put_files(prefix, {"m/config.pbtxt": FILES["m/config.pbtxt"]})
    fetch(s3.url(prefix), tmp_path)
    (file,) = tmp_path.glob("*/objects/*")
    file.unlink()
    file.mkdir()

    async def check() -> None:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            assert read_files(find(mirror, "m").path) == {"config.pbtxt": b'backend: "python"'}

    asyncio.run(check())
    assert "failed to keep" in caplog.text and incomplete(tmp_path) == set()


def test_a_fetch_after_a_cancelled_one_writes_to_files_of_its_own(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)
    reached, released = threading.Semaphore(0), threading.Event()

    def hold(*request: object) -> None:
        reached.release()
        released.wait(DEADLINE)

    async def check() -> None:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            s3.fault = objects_only(hold)
            written: list[set[Path]] = []
            try:
                for _ in range(2):
                    fetching = asyncio.create_task(fetch_from(mirror, "m"))
                    assert await asyncio.to_thread(reached.acquire, timeout=DEADLINE)
                    written.append(incomplete(tmp_path))
                    fetching.cancel()
                    await asyncio.wait([fetching])
            finally:
                released.set()
            assert written[0] and written[1] - written[0]
            fetched = await fetch_from(mirror, "m")
            assert read_files(fetched.path)["1/weights"] == FILES["m/1/weights"]
            fetched.close()

    asyncio.run(check())


def test_a_model_in_the_cache_that_has_lost_a_file_is_completed(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)
    fetch(s3.url(prefix), tmp_path)
    (file,) = tmp_path.glob("*/*/m/1/weights")
    file.chmod(0o600)
    file.write_bytes(b"")  # as after a power failure; the object is the same file
    assert fetch(s3.url(prefix), tmp_path)["1/weights"] == FILES["m/1/weights"]


def test_a_model_whose_name_no_folder_can_have_fails_alone(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    name = 300 * "a"
    s3.fault = list_fault([f"{prefix}/{key}" for key in (f"{name}/config.pbtxt", "m/1/x")])

    async def check() -> None:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            with pytest.raises(HostError, match="a longer name than a folder can have"):
                fingerprint(mirror, name)
            assert find(mirror, "m").path.is_dir()

    asyncio.run(check())


def test_a_model_whose_stand_in_cannot_be_written_fails_alone(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    deep = "/".join(20 * [250 * "d"])  # each name may be that of a file, but not the path
    s3.fault = list_fault([f"{prefix}/{key}" for key in (f"deep/1/{deep}", "m/1/x")])

    async def check() -> None:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            with pytest.raises(HostError, match=r"failed to prepare '\S+/deep': .*too long"):
                fingerprint(mirror, "deep")
            assert find(mirror, "m").path.is_dir()

    asyncio.run(check())


def test_an_empty_object_beside_the_models_is_no_model(
    s3: S3Server, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    s3.put_files(prefix, {**FILES, "_SUCCESS": ""})

    async def check() -> None:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            await mirror.refresh()
            assert names(mirror) == ["m"]

    asyncio.run(check())
    assert len(re.findall("ignore '.*/_SUCCESS', an empty object", caplog.text)) == 1


def test_only_the_user_of_the_cache_can_enter_it_and_files_cannot_be_written(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, {**FILES, "m/1/empty": ""})
    cache = tmp_path / "a" / "cache"
    fetch(s3.url(prefix), cache)
    (folder,) = cache.glob("*-m")
    assert {path.stat().st_mode & 0o777 for path in (cache, folder)} == {0o700}
    objects = list((folder / "objects").iterdir())
    assert {path.stat().st_mode & 0o777 for path in objects} == {0o444}
    assert len(objects) == 3


def test_a_listing_does_not_replace_what_a_later_one_has_found(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)
    listed, released = threading.Event(), threading.Event()

    def hold(environ: dict[str, Any], start: Callable[..., Any], store: Application) -> Any:
        if "list-type" not in environ["QUERY_STRING"] or listed.is_set():
            return None
        body = [b"".join(store(environ, start))]
        listed.set()
        released.wait(DEADLINE)
        return body

    async def check() -> None:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            s3.fault = hold
            slow = asyncio.create_task(mirror.refresh())
            try:
                assert await asyncio.to_thread(listed.wait, DEADLINE)
                s3.put_files(prefix, {"new/1/x": "new", "m/1/weights": "changed"})
                await mirror.refresh("new")
                await mirror.refresh("m")
                changed = fingerprint(mirror, "m")
            finally:
                released.set()
            await slow
            assert names(mirror) == ["m", "new"]
            assert fingerprint(mirror, "m") == changed

    asyncio.run(check())


def test_a_failed_listing_does_not_hide_what_a_later_one_has_found(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)
    reached, released = threading.Event(), threading.Event()

    def hold(environ: dict[str, Any], start: Callable[..., Any], store: Application) -> Any:
        if reached.is_set():
            return None
        reached.set()
        released.wait(DEADLINE)
        return status("403 Forbidden")(environ, start, store)

    async def check() -> None:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            s3.fault = hold
            slow = asyncio.create_task(mirror.refresh())
            try:
                assert await asyncio.to_thread(reached.wait, DEADLINE)
                await mirror.refresh()
            finally:
                released.set()
            await slow
            assert mirror.counts.failures == 1
            assert names(mirror) == ["m"]

    asyncio.run(check())


def test_a_model_and_its_configuration_change_together(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)
    reached, released = threading.Event(), threading.Event()

    def hold(*request: object) -> None:
        reached.set()
        released.wait(DEADLINE)

    async def check() -> None:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            before = fingerprint(mirror, "m"), find(mirror, "m").path
            s3.put(f"{prefix}/m/config.pbtxt", "max_batch_size: 8")
            s3.fault = objects_only(hold, "config.pbtxt")
            refresh = asyncio.create_task(mirror.refresh())
            try:
                assert await asyncio.to_thread(reached.wait, DEADLINE)
                assert (fingerprint(mirror, "m"), find(mirror, "m").path) == before
            finally:
                released.set()
            await refresh
            assert fingerprint(mirror, "m") != before[0]
            config = find(mirror, "m").path / "config.pbtxt"
            assert config.read_text() == "max_batch_size: 8"
            assert before[1].is_dir(), "a load may still read it"

    asyncio.run(check())


def test_stand_ins_that_were_replaced_are_removed_later(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "_REPLACED_SECONDS", 0.0)

    async def check() -> None:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            paths = []
            for content in "abc":
                s3.put(f"{prefix}/m/1/x", content)
                await mirror.refresh()
                paths.append(find(mirror, "m").path)
            await mirror.refresh()
            assert [path.exists() for path in paths] == [False, False, True]

    asyncio.run(check())


def test_a_model_that_was_looked_up_stays_as_it_was_listed(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)

    async def check() -> None:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            found = Repository([], mirrors=[mirror]).find_model_directory("m")
            before = found.fingerprint("m", lambda *_: frozenset())
            s3.put(f"{prefix}/m/config.pbtxt", "max_batch_size: 8")
            await mirror.refresh()
            assert found.fingerprint("m", lambda *_: frozenset()) == before
            assert (found.path / "config.pbtxt").read_text() == FILES["m/config.pbtxt"]

    asyncio.run(check())


def test_a_failed_listing_of_an_unknown_model_leaves_the_others(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, FILES)

    async def check() -> None:
        async with opened(s3.url(prefix), tmp_path) as mirror:
            s3.fault = status("403 Forbidden")
            await mirror.refresh("other")
            assert names(mirror) == ["m"]
            with pytest.raises(HostError, match="failed to list .*/other'"):
                mirror.check()

    asyncio.run(check())


def test_a_model_larger_than_the_cache_removes_none(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, {"a/1/x": 1000 * b"a", "b/1/x": 3000 * b"b"})
    url, limit = s3.url(prefix), 2500
    fetch(url, tmp_path, "a", limit)
    with pytest.raises(HostError, match="no room for 3000 bytes"):
        fetch(url, tmp_path, "b", limit)
    assert cached(tmp_path) == {"a"}


def test_models_that_are_fetched_at_the_same_time_share_the_room(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, {"a/1/x": 1000 * b"a", "b/1/x": 1000 * b"b"})

    async def check() -> list[BaseException | object]:
        async with opened(s3.url(prefix), tmp_path, 1500) as mirror:
            both = (fetch_from(mirror, name) for name in "ab")
            return await asyncio.gather(*both, return_exceptions=True)

    failed = [one for one in asyncio.run(check()) if isinstance(one, HostError)]
    assert len(failed) == 1 and "no room for 1000 bytes" in failed[0].message


def test_servers_that_share_the_cache_know_what_the_others_need(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, {"a/1/x": 1000 * b"a", "b/1/x": 1000 * b"b"})
    url, limit = s3.url(prefix), 1500
    reached, released = threading.Event(), threading.Event()

    def hold(*request: object) -> None:
        reached.set()
        released.wait(DEADLINE)

    async def check() -> None:
        async with opened(url, tmp_path, limit) as one, opened(url, tmp_path, limit) as other:
            s3.fault = objects_only(hold, "a/1/x")
            fetching = asyncio.create_task(fetch_from(one, "a"))
            try:
                assert await asyncio.to_thread(reached.wait, DEADLINE)
                text = "no room for 1000 bytes .* other models that are fetched now need 1000"
                with pytest.raises(HostError, match=text):
                    await fetch_from(other, "b")
                fetching.cancel()
                await asyncio.wait([fetching])
                (await fetch_from(other, "b")).close()
            finally:
                released.set()

    asyncio.run(check())


def test_what_a_killed_server_has_reserved_does_not_count(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    s3.put_files(prefix, {"a/1/x": 1000 * b"a", "b/1/x": 1000 * b"b"})
    fetch(s3.url(prefix), tmp_path, "a", limit=2500)
    (lock,) = tmp_path.glob("*-a/lock")
    lock.write_text("2000")
    fetch(s3.url(prefix), tmp_path, "b", limit=2500)
    assert cached(tmp_path) == {"a", "b"}


def test_what_a_killed_fetch_has_left_makes_room(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    s3.put_files(prefix, {"a/1/x": 1000 * b"a", "b/1/x": 1000 * b"b"})
    url = s3.url(prefix)
    fetch(url, tmp_path, "a")
    (folder,) = tmp_path.glob("*-a")
    (snapshot,) = (path.parent for path in folder.glob("*/a"))
    shutil.rmtree(snapshot)  # as if it had not been made yet
    assert fetch(url, tmp_path, "b", limit=1500)
    assert not list((folder / "objects").iterdir())


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (once(status("503 Slow Down")), ""),
        (
            status("403 Forbidden"),
            "failed to read the encryption of '.*weights': HEAD returned 403",
        ),
        (status("500 Oh"), "failed to read the encryption of '.*' within 1 s: HEAD returned 500"),
    ],
    ids=["once", "refused", "always"],
)
def test_a_header_that_cannot_be_read_is_not_taken_for_a_damaged_object(
    s3: S3Server, prefix: str, tmp_path: Path, spoil: Any, cause: str
) -> None:
    s3.put_files(prefix, FILES)
    s3.put(f"{prefix}/m/1/weights", b"plain", {"x-amz-server-side-encryption": "aws:kms"})

    def fault(
        environ: dict[str, Any], start: Callable[..., Any], store: Application
    ) -> Iterable[bytes] | None:
        if not environ["PATH_INFO"].endswith("weights"):
            return None
        if environ["REQUEST_METHOD"] == "HEAD":
            return cast(Iterable[bytes] | None, spoil(environ, start, store))
        b"".join(store(environ, start))
        return [b"other"]

    s3.fault = fault
    if cause:
        with pytest.raises(HostError, match=cause):
            fetch(s3.url(prefix), tmp_path)
    else:
        assert fetch(s3.url(prefix), tmp_path)["1/weights"] == b"other"


def reading_process() -> psutil.Process:
    """The process of this one that reads object stores."""
    (found,) = [
        child
        for child in psutil.Process().children()
        if "pbhost-object-store" in " ".join(child.cmdline())
    ]
    return found


@asynccontextmanager
async def fetching(
    s3: S3Server, prefix: str, cache: Path
) -> AsyncIterator[tuple[StoreMirror, asyncio.Task[Any], threading.Event]]:
    """A mirror, a fetch that waits for the store, and what lets the store answer."""
    s3.put_files(prefix, FILES)
    asked, released = threading.Event(), threading.Event()

    def wait(*request: object) -> None:
        asked.set()
        released.wait(DEADLINE)

    s3.fault = objects_only(wait)
    try:
        async with opened(s3.url(prefix), cache) as mirror:
            task = asyncio.get_running_loop().create_task(fetch_from(mirror, "m"))
            assert await asyncio.to_thread(asked.wait, DEADLINE)
            yield mirror, task, released
    finally:
        released.set()


def test_a_fetch_fails_with_the_process_that_reads_and_the_next_one_starts_it_again(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with fetching(s3, prefix, tmp_path) as (mirror, task, released):
            reading_process().kill()
            text = "the process that reads object stores has ended with status -9"
            with pytest.raises(HostError, match=text):
                await asyncio.wait_for(task, DEADLINE)
            released.set()
            (await fetch_from(mirror, "m")).close()

    asyncio.run(run())


def test_a_process_that_hangs_is_killed_and_the_next_fetch_starts_it_again(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host.repository.object_store.client._SILENT_BEATS", 2)

    async def run() -> None:
        async with fetching(s3, prefix, tmp_path) as (mirror, task, released):
            hanging = reading_process()
            hanging.suspend()
            text = "the process that reads object stores did not respond for 2 s, and was killed"
            with pytest.raises(HostError, match=text):
                await asyncio.wait_for(task, DEADLINE)
            assert not hanging.is_running()
            released.set()
            (await fetch_from(mirror, "m")).close()

    asyncio.run(run())


def test_a_fetch_in_progress_fails_when_the_server_disconnects(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with fetching(s3, prefix, tmp_path) as (mirror, task, _):
            await mirror.disconnect()
            with pytest.raises(HostError, match="the process that reads object stores has ended"):
                await asyncio.wait_for(task, DEADLINE)

    asyncio.run(run())


def test_a_cache_that_is_removed_while_a_model_is_fetched_is_an_error(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with fetching(s3, prefix, tmp_path) as (_, task, released):
            objects = next(iter(incomplete(tmp_path))).parent
            shutil.rmtree(objects)
            released.set()
            text = rf"failed to write {objects}/\S+\.new: No such file or directory"
            with pytest.raises(HostError, match=text):
                await asyncio.wait_for(task, DEADLINE)

    asyncio.run(run())


def test_a_signal_to_the_process_group_does_not_end_a_fetch(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with fetching(s3, prefix, tmp_path) as (_, task, released):
            reading_process().terminate()
            released.set()
            (await asyncio.wait_for(task, DEADLINE)).close()

    asyncio.run(run())


def test_the_token_of_the_environment_does_not_go_with_other_keys(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_files(prefix, FILES)
    file = tmp_path / "credentials.json"
    file.write_text('{"s3": {"": {"key_id": "k", "secret_key": "s"}}}')
    monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", str(file))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-other-keys")
    sent: list[object] = []

    def look(environ: dict[str, Any], *_: object) -> None:
        sent.append(environ.get("HTTP_X_AMZ_SECURITY_TOKEN"))

    s3.fault = look
    assert fetch(s3.url(prefix), tmp_path / "cache")
    assert set(sent) == {None}


def test_an_index_has_the_models_of_the_last_listing_if_the_store_is_silent(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host.repository.repository._SOON_SECONDS", 0.05)
    s3.put_files(prefix, FILES)
    released = threading.Event()

    def hold(*request: object) -> None:
        released.wait(DEADLINE)

    async def run() -> None:
        settings = MirrorSettings(tmp_path, 0, parts=4, stall_seconds=DEADLINE)
        repository = open_repository([s3.url(prefix)], False, settings)
        await repository.refresh()
        s3.fault = hold
        try:
            for _ in range(2):
                await repository.refresh_soon()
                assert list(repository.scan().models) == ["m"]
            assert sum("list-type" in one for one in s3.requests) == 2, "a listing for both"
            released.set()
            s3.fault = None
            await repository.refresh()
            s3.put(f"{prefix}/new/1/x", "new")
            monkeypatch.setattr("host.repository.repository._SOON_SECONDS", DEADLINE)
            await repository.refresh_soon()  # the one that was held may be meant
            await repository.refresh_soon()
            assert list(repository.scan().models) == ["m", "new"]
        finally:
            released.set()
            await repository.close()

    s3.objects_read()
    asyncio.run(asyncio.wait_for(run(), DEADLINE))
