"""URLs, credentials and the cache folder of repositories in object stores."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import hmac
import json
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pytest

from host.errors import HostError
from host.repository.object_store import worker
from host.repository.object_store.cache import ModelCache, RepositoryCache
from host.repository.object_store.credentials import read_settings
from host.repository.object_store.listed_model import group_by_model
from host.repository.object_store.location import StoreLocation, is_store_url, parse_store_url
from host.repository.object_store.messages import Request
from host.repository.object_store.store import ObjectStore, Slots, write_all
from host.repository.object_store.stored_object import UNLISTED, StoredObject
from host.repository.open_repository import MirrorSettings, open_repository
from tests.conftest import DEADLINE, wait_until


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("s3://b", StoreLocation("s3://b", "s3", "b", "")),
        ("s3://b/p/q/", StoreLocation("s3://b/p/q", "s3", "b", "p/q")),
        (
            "s3://https://host:9000/b/p",
            StoreLocation("s3://https://host:9000/b/p", "s3", "b", "p", "https://host:9000"),
        ),
        ("s3://h.x:9/b", StoreLocation("s3://h.x:9/b", "s3", "b", "", "http://h.x:9")),
        ("gs://b/p", StoreLocation("gs://b/p", "gs", "b", "p")),
        ("as://acc/c/p", StoreLocation("as://acc/c/p", "as", "c", "p", "", "acc")),
        (
            "as://acc.blob.core.windows.net/c",
            StoreLocation(
                "as://acc.blob.core.windows.net/c",
                "as",
                "c",
                "",
                "https://acc.blob.core.windows.net",
                "acc",
            ),
        ),
    ],
)
def test_urls_are_those_of_triton(text: str, location: StoreLocation) -> None:
    assert parse_store_url(text) == location


@pytest.mark.parametrize(
    "text", ["s3://", "s3:///p", "s3://https://", "gs://", "as://acc", "s3://b/../c"]
)
def test_a_url_without_a_bucket_names_what_is_expected(text: str) -> None:
    with pytest.raises(HostError, match=r"is not the URL of a model repository, expected \w\w://"):
        parse_store_url(text)


def test_a_whole_bucket_is_no_model() -> None:
    with pytest.raises(HostError, match="'s3://b' is a whole bucket, expected a model in it"):
        parse_store_url("s3://b").parent  # noqa: B018  # raises


def test_paths_are_no_urls() -> None:
    assert not any(map(is_store_url, ["models", "/s3://x", "s3:/b", "http://b/c"]))


def settings(url: str, **environment: str) -> dict[str, object]:
    """The settings of a store, without the user's own files."""
    return read_settings(parse_store_url(url), {"HOME": "/nonexistent", **environment})


def test_the_longest_prefix_of_the_credential_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    content = {
        "s3": {
            "": {"key_id": "any", "secret_key": "0"},
            "s3://b": {"key_id": "b", "secret_key": "1", "region": "eu-west-1"},
            "s3://b/p": {"key_id": "p", "secret_key": "2", "session_token": "t"},
        },
        "gs": {"gs://b": "/keys.json"},
        "as": {"as://acc/c": {"account_str": "other", "account_key": "k"}},
    }
    file.write_text(json.dumps(content))
    path = {"TRITON_CLOUD_CREDENTIAL_PATH": str(file), "AWS_ACCESS_KEY_ID": "environment"}
    keys = [settings(url, **path)["access_key_id"] for url in ("s3://a", "s3://b/q", "s3://b/p/q")]
    assert keys == ["any", "b", "p"]
    assert settings("s3://b/p", **path) == {
        "access_key_id": "p",
        "secret_access_key": "2",
        "session_token": "t",
        "region": "us-east-1",
    }
    assert settings("s3://b", **path)["region"] == "eu-west-1"
    assert settings("gs://b/m", **path) == {"application_credentials": "/keys.json"}
    assert settings("as://acc/c/m", **path) == {"account_name": "other", "account_key": "k"}
    assert settings("as://acc/d", **path) == {"account_name": "acc"}


@pytest.mark.parametrize("content", ["{", "[]", '{"s3": 1}', '{"s3": {"": "key"}}'])
def test_a_wrong_credential_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(content)
    with pytest.raises(HostError, match="TRITON_CLOUD_CREDENTIAL_PATH"):
        settings("s3://b", TRITON_CLOUD_CREDENTIAL_PATH=str(file))
    with pytest.raises(HostError, match="No such file"):
        settings("s3://b", TRITON_CLOUD_CREDENTIAL_PATH=str(tmp_path / "missing"))


def test_profiles_of_the_aws_tools_are_read(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        "[default]\naws_access_key_id = d\naws_secret_access_key = s\n"
        "[work]\naws_access_key_id = w\n"
    )
    (tmp_path / ".aws/config").write_text("[profile work]\nregion = eu-north-1\n")
    home = {"HOME": str(tmp_path)}
    assert settings("s3://b", **home)["access_key_id"] == "d"
    work = {"region": "eu-north-1", "access_key_id": "w"}
    assert settings("s3://b", AWS_PROFILE="work", **home) == work
    # Keys in the environment come before a profile that is only the default.
    assert "access_key_id" not in settings("s3://b", AWS_ACCESS_KEY_ID="e", **home)
    with pytest.raises(HostError, match="profile 'other' is neither in"):
        settings("s3://b", AWS_PROFILE="other", **home)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"aws_secret_access_key = TOPSECRET\n", "MissingSectionHeaderError in line 1"),
        (b"[default]\naws_access_key_id = k\nTOPSECRET\n", "ParsingError in line 3"),
        (b"[default]\nTOPSECRET = 1\nTOPSECRET = 2\n", "DuplicateOptionError in line 3"),
        (b"[default]\naws_secret_access_key = TOPSECRET\xff\n", "UnicodeDecodeError"),
    ],
)
def test_an_error_in_a_file_of_keys_does_not_show_them(
    tmp_path: Path, content: bytes, cause: str
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(HostError) as caught:
        settings("s3://b", AWS_SHARED_CREDENTIALS_FILE=str(file))
    assert caught.value.message == f"failed to read {file}: {cause}"


def test_a_profile_without_keys_says_what_it_has_instead(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text("[default]\ncredential_process = p\n[profile work]\nsso_session = s\n")
    here = {"AWS_CONFIG_FILE": str(file)}
    for environment, expected in (
        ({"AWS_PROFILE": "work"}, r"profile 'work' in .* has credentials by 'sso_session', expec"),
        ({}, r"profile 'default' in .* has credentials by 'credential_process', expected"),
    ):
        with pytest.raises(HostError, match=expected):
            settings("s3://b", **here, **environment)
    assert settings("s3://b", AWS_SKIP_SIGNATURE="true", **here)["skip_signature"]
    assert settings("s3://b", AWS_ACCESS_KEY_ID="k", AWS_PROFILE="work", **here)


def test_requests_are_anonymous_only_where_that_is_asked_for() -> None:
    assert "skip_signature" not in settings("s3://b")
    assert settings("s3://b", AWS_SKIP_SIGNATURE="true")["skip_signature"]
    assert settings("s3://b", AWS_EC2_METADATA_DISABLED="true")["skip_signature"]
    with_role = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_WEB_IDENTITY_TOKEN_FILE": "/t"}
    assert "skip_signature" not in settings("s3://b", **with_role)
    assert settings("gs://b", GOOGLE_SKIP_SIGNATURE="1")["skip_signature"]
    assert settings("as://a/c", AZURE_SKIP_SIGNATURE="1")["skip_signature"]
    emulator = settings("gs://b", STORAGE_EMULATOR_HOST="localhost:4443")
    assert emulator == {"base_url": "http://localhost:4443", "skip_signature": True}


def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    settings = MirrorSettings(tmp_path, limit=0, parts=1, stall_seconds=1.0)
    with pytest.raises(HostError, match=r"'s3://b' needs .* pip install 'pbhost\[cloud\]'"):
        open_repository(["s3://b"], False, settings)
    assert open_repository([tmp_path], False, settings).scan().models == {}


def test_a_process_that_cannot_be_started_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="needs pbhost[cloud]")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    settings = MirrorSettings(tmp_path, limit=0, parts=1, stall_seconds=1.0)
    repository = open_repository(["s3://b"], False, settings)

    async def list_once() -> None:
        await repository.refresh()
        await repository.close()

    asyncio.run(list_once())
    text = "failed to list 's3://b': cannot start the process that reads object stores: No such"
    with pytest.raises(HostError, match=text):
        repository.check_paths()


@pytest.mark.parametrize("path", ["m//x", "m/1/__pycache__//x"])
def test_a_model_that_cannot_be_listed_names_the_key(path: str) -> None:
    models, _ = group_by_model("gs://b", [StoredObject(path, UNLISTED, "", "", 0.0)])
    with pytest.raises(HostError, match=f"list 'gs://b/m': no file can be named '{path}'; rename"):
        models["m"].fingerprint  # noqa: B018  # raises


def test_credentials_that_the_library_refuses_are_an_error() -> None:
    pytest.importorskip("obstore", reason="needs pbhost[cloud]")
    store = ObjectStore(parse_store_url("gs://b/p"), {"application_credentials": "/missing"}, 1.0)
    with pytest.raises(HostError, match="cannot use 'gs://b/p': .*/missing"):
        store.open()


def open_signing(location: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A store of S3 with keys; nothing has been sent."""
    pytest.importorskip("obstore", reason="needs pbhost[cloud]")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("HOME", "/nonexistent")
    place = parse_store_url(location)
    store = ObjectStore(place, read_settings(place, os.environ), 1.0)
    store.open()
    return store


@pytest.mark.parametrize("location", ["s3://b/p/q", "s3://https://named:9/b"])
@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"AWS_REGION": "eu-west-1"},
        {"AWS_ENDPOINT_URL": "http://h:1/"},
        {"AWS_ENDPOINT_URL_S3": "http://only:1", "AWS_ENDPOINT_URL": "https://h:1"},
        {"AWS_ENDPOINT": "http://e:1"},
        {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
        {"AWS_ENDPOINT_URL": "https://b.h:1", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
    ],
)
def test_listings_and_objects_are_read_from_the_same_server(
    location: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = open_signing(location, monkeypatch)

    async def sign() -> tuple[str, str]:
        import obstore

        by_library = await obstore.sign_async(store._client, "GET", "x", timedelta(minutes=5))
        return by_library, await store._listing_url({"prefix": "p/q/"})

    object_url, listing_url = map(urlsplit, asyncio.run(sign()))
    assert listing_url[:2] == object_url[:2]
    assert dict(parse_qsl(listing_url.query))["prefix"] == "p/q/"
    below = "/p/q/x" if location.endswith("q") else "/x"
    assert listing_url.path.rstrip("/") == object_url.path.removesuffix(below)
    if location.startswith("s3://https"):
        assert object_url.netloc == "named:9"


def test_anonymous_listings_are_not_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://only:1")
    place = parse_store_url("s3://b/p")
    store = ObjectStore(place, {"skip_signature": True, "region": "us-east-1"}, 1.0)
    pytest.importorskip("obstore", reason="needs pbhost[cloud]")
    assert asyncio.run(store._listing_url({"prefix": "p/"})) == "http://only:1/b?prefix=p%2F"


@pytest.mark.parametrize("location", ["s3://b", "s3://https://named:9/b"])
def test_listings_have_the_signature_of_their_query(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = {"prefix": "a +ü~*'()!&=%41/", "continuation-token": "1+/=="}
    url = urlsplit(asyncio.run(open_signing(location, monkeypatch)._listing_url(query)))
    assert "+" not in url.query, "a plus or a space, as the server decodes it"
    pairs = (pair.partition("=") for pair in url.query.split("&"))
    signed = [(unquote(name), unquote(value)) for name, _, value in pairs]
    signature = dict(signed)["X-Amz-Signature"]
    signed.remove(("X-Amz-Signature", signature))
    names = sorted(f"{quote(key, '')}={quote(value, '')}" for key, value in signed)
    said = dict(signed)
    assert said.items() >= query.items()
    request = f"GET\n{url.path}\n{'&'.join(names)}\nhost:{url.netloc}\n\nhost\nUNSIGNED-PAYLOAD"
    scope = said["X-Amz-Credential"].partition("/")[2]
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{said['X-Amz-Date']}\n{scope}\n{digest}"
    key = b"AWS4secret"
    for part in (*scope.split("/"), text):
        key = hmac.digest(key, part.encode(), "sha256")
    assert key.hex() == signature


def test_a_server_that_has_just_taken_the_lock_of_a_model_is_waited_for(tmp_path: Path) -> None:
    async def check() -> None:
        cache = ModelCache(tmp_path / "m")
        async with cache.lock(1.0):

            async def wait() -> None:
                async with cache.lock(1.0):
                    pass

            await asyncio.sleep(0)
            os.utime(cache.path / "lock", (0, 0))
            waiting = asyncio.create_task(wait())
            await asyncio.wait([waiting], timeout=0.2)
            assert not waiting.done()
        await asyncio.wait_for(waiting, DEADLINE)

    asyncio.run(check())


def test_the_lock_of_a_model_is_touched_while_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host.repository.object_store.cache._HEARTBEAT_SECONDS", 0.01)

    async def check() -> None:
        cache = ModelCache(tmp_path / "m")
        lock = cache.path / "lock"
        async with cache.lock(1.0):
            for _ in range(2):
                os.utime(lock, (0, 0))
                await asyncio.to_thread(wait_until, lambda: os.stat(lock).st_mtime > 0, "a touch")

    asyncio.run(check())


def test_a_server_that_holds_the_lock_of_a_model_and_hangs_is_named(tmp_path: Path) -> None:
    async def check() -> None:
        cache = ModelCache(tmp_path / "m")
        cache.create()
        with (cache.path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            text = rf"another server has held {cache.path / 'lock'} for 0.1 s and does not respond"
            with pytest.raises(HostError, match=text):
                async with cache.lock(0.05):
                    pass

    asyncio.run(check())


def test_two_objects_that_are_one_file_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link
    monkeypatch.setattr(os, "link", lambda source, path: link(source, Path(str(path).lower())))
    cache = ModelCache(tmp_path / "m")
    cache.create()
    files = {name: StoredObject(f"m/{name}", 1, name, "", 0.0) for name in ("Model.py", "model.py")}
    for stored in files.values():
        cache.write(stored, b"x")
    with pytest.raises(HostError, match=r"'m' are the same file in .*model\.py \(its file system"):
        cache.assemble("snapshot", "m", files, [], [])


def test_a_directory_that_is_incomplete_when_it_was_made_is_an_error(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "m")
    cache.create()
    stored = StoredObject("m/x", 5, "e", "", 0.0)
    cache.write(stored, b"short"[:3])
    with pytest.raises(HostError, match="is incomplete, though it was just made: is the disk full"):
        cache.assemble("snapshot", "m", {"x": stored}, [], [])


def test_a_cache_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(HostError, match="cannot use the cache of repositories at .*: File exists"):
        RepositoryCache(tmp_path / "cache", limit=0).model("s3://b", "m").create()


def test_objects_that_vanish_while_they_are_counted_do_not_matter(tmp_path: Path) -> None:
    cache = RepositoryCache(tmp_path, limit=10)
    folder = cache.model("s3://b", "m")
    folder.create()
    (folder.objects / "gone").symlink_to("missing")  # is listed, but has no status
    wanted = StoredObject("m/x", 5, "e", "", 0.0)
    assert folder.find_missing({wanted.identity: wanted}) == [wanted]
    asyncio.run(cache.make_room(5, folder, [wanted], stall_seconds=1.0))


def test_a_cancelled_fetch_is_locked_until_it_removes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = RepositoryCache(tmp_path / "cache", 0)
    model = cache.model("s3://b", "m")
    model.create()
    as_usual = shutil.disk_usage
    entered, released = threading.Event(), threading.Event()

    def wait_for_release(path: Path) -> Any:
        entered.set()
        assert released.wait(DEADLINE)
        return as_usual(path)

    def is_locked() -> bool:
        with (cache.root / "lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    monkeypatch.setattr(shutil, "disk_usage", wait_for_release)

    async def check() -> None:
        making = asyncio.create_task(cache.make_room(1, model, [], 1.0))
        assert await asyncio.to_thread(entered.wait, DEADLINE)
        making.cancel()
        for _ in range(10):  # turns of the event loop
            await asyncio.sleep(0)
        locked = is_locked()
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert locked and not is_locked()

    asyncio.run(check())


def test_complete_objects_count_in_full(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "cache" / "m")
    cache.create()
    for name in ("complete", "partial.new"):  # some file systems count blocks late
        with (cache.objects / name).open("wb") as file:
            file.truncate(1 << 20)
    assert cache.written() == 1 << 20


def test_a_cache_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root, to give a folder to another user")
    root = tmp_path / "cache"
    root.mkdir()
    os.chown(root, 12345, -1)
    with pytest.raises(HostError, match="cache belongs to another user"):
        RepositoryCache(root, limit=0).model("s3://b", "m").create()


def test_rotated_credentials_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials.json"
    monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", str(file))
    monkeypatch.setattr(worker, "_SETTINGS_SECONDS", -1.0)
    process = worker.Worker(cast(Any, None), parts=1)

    def store_with(token: str) -> ObjectStore:
        entry = {"key_id": "k", "secret_key": "s", "session_token": token}
        file.write_text(json.dumps({"s3": {"": entry}}))
        return process.find_store(Request(1, "s3://b", 1.0))

    first = store_with("one")
    assert store_with("one") is first
    assert store_with("two").settings["session_token"] == "two"


def test_a_cancelled_read_closes_its_file_after_the_last_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="needs pbhost[cloud]")
    writing, released = threading.Event(), threading.Event()
    order: list[str] = []
    close = os.close

    def write(file: int, chunk: bytes, position: int) -> int:
        writing.set()
        assert released.wait(DEADLINE)
        order.append("written")
        return len(chunk)

    def close_file(file: int) -> None:
        order.append("closed")
        close(file)

    async def stream(*_: object) -> AsyncIterator[bytes]:
        yield b"content"

    store = ObjectStore(parse_store_url("s3://b"), {"skip_signature": True}, 1.0)
    monkeypatch.setattr(store, "_stream", stream)
    monkeypatch.setattr(os, "pwrite", write)

    async def cancel() -> None:
        stored = StoredObject("m/x", 7, "", "", 0.0)
        monkeypatch.setattr(os, "close", close_file)
        fetch = asyncio.ensure_future(store.fetch(stored, tmp_path / "x", Slots(1), lambda _: None))
        assert await asyncio.to_thread(writing.wait, 10.0)
        fetch.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        monkeypatch.setattr(os, "close", close)

    asyncio.run(cancel())
    assert order == ["written", "closed"]
    assert not list(tmp_path.iterdir())


class FailingPages:
    """A client whose listings have one page, and then fail."""

    async def list(self, folder: str | None) -> AsyncIterator[list[dict[str, Any]]]:
        changed = datetime.now(timezone.utc)
        yield [{"path": "m", "size": 1, "e_tag": "", "version": "", "last_modified": changed}]
        raise ValueError("status code: 503 Service Unavailable")


def test_a_listing_that_always_fails_at_the_second_page_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("host.repository.object_store.store._MAX_PAUSE", 0.01)
    listed = ObjectStore(parse_store_url("s3://b"), {}, stall_seconds=0.2)
    monkeypatch.setattr(listed, "_client", FailingPages())
    with pytest.raises(HostError, match=r"failed to list 's3://b' within 0\.2 s: .* returned 503"):
        asyncio.run(asyncio.wait_for(listed.list(), 10.0))


def test_what_a_full_disk_does_not_take_is_written_next(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[bytes, int]] = []

    def write_two(file: int, chunk: memoryview, position: int) -> int:
        taken.append((bytes(chunk[:2]), position))
        return len(chunk[:2])

    monkeypatch.setattr(os, "pwrite", write_two)
    write_all(0, b"abcde", 7)
    assert taken == [(b"ab", 7), (b"cd", 9), (b"e", 11)]


def test_a_model_in_a_folder_is_found_without_asking_a_store(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="needs pbhost[cloud]")
    (tmp_path / "models/local").mkdir(parents=True)
    settings = MirrorSettings(tmp_path / "cache", limit=0, parts=1, stall_seconds=0.1)
    repository = open_repository(
        [tmp_path / "models", "s3://http://127.0.0.1:1/b"], False, settings
    )

    async def refresh() -> int:
        await repository.refresh("local")
        asked = repository.mirrors[0].counts.listings
        await repository.close()
        return asked

    assert asyncio.run(refresh()) == 0
    assert repository.find_model_directory("local").path == tmp_path / "models/local"
