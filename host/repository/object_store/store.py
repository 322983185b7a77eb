"""An object store: lists and reads objects, with retries, and says what failed where.

The only module that uses the library `obstore`. It runs in a process of its own (`worker`).
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import os
import random
import re
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from email.message import Message
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote_plus, urlencode, urlsplit
from xml.etree import ElementTree

from host.errors import internal, unavailable
from host.repository.object_store.credentials import Settings
from host.repository.object_store.location import AZURE, GCS, S3, StoreLocation
from host.repository.object_store.stored_object import NEW, UNLISTED, ObjectChanged, StoredObject
from host.system.event_loop import run_all, run_in_thread

PART_BYTES = 32 << 20
"""Larger objects are read in parts of this size, several at a time."""

_CHUNK_BYTES = 1 << 20
_FIRST_PAUSE, _MAX_PAUSE = 0.1, 5.0  # seconds between two tries
_CONNECT_SECONDS = 5.0
_PER_REQUEST = timedelta(hours=12)  # what is limited is the time without a byte
_RETRIED = (408, 429)  # of the statuses below 500
_MD5 = re.compile(r"[0-9a-f]{32}")
_STATUS = re.compile(r"status code: ([0-9]{3})[^:]*")
_NAMED_KEY = re.compile('Path "([^"]*)"')
_LISTINGS = 16  # of folders, at the same time
_SIGNED = timedelta(minutes=5)
_ENDPOINTS = ("aws_endpoint_url_s3", "endpoint", "base_url")  # of settings
_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_ENTRY = ("Key", "Size", "ETag", "LastModified")
_ELEMENTS = re.compile(r"<(Code|Message)>([^<]*)</")
_Result = TypeVar("_Result")


class Slots:
    """Limits what is read at the same time: `count` parts, of `count` files."""

    def __init__(self, count: int) -> None:
        self.files = asyncio.Semaphore(count)
        self.parts = asyncio.Semaphore(count)


class ObjectStore:
    """The objects below a location. `stall_seconds`: the most time without a byte."""

    def __init__(self, location: StoreLocation, settings: Settings, stall_seconds: float) -> None:
        self.location = location
        self.settings = settings
        self._stall_seconds = stall_seconds
        self._client: Any = None
        self._bucket_url = ""  # of S3
        self._has_odd_keys = False  # of S3: those that the library refuses, as far as is known
        self._failure: type[Exception] = Exception  # what the library raises

    def open(self) -> None:
        """Imports the library, and makes the client. Raises HostError."""
        if self._client is None:
            self._client = self._make_client()

    def _make_client(self) -> Any:
        import obstore.store

        stores: Any = obstore.store
        self._failure = stores.BaseError
        location, settings = self.location, self.settings
        options = {**self._options(), "prefix": location.prefix or None}
        try:
            if location.kind == GCS:
                return stores.GCSStore(location.bucket, config=settings, **options)
            if location.kind == AZURE:
                return stores.AzureStore(location.bucket, config=settings, **options)
            return _open_s3(location.bucket, settings, options)
        except (self._failure, ValueError) as error:
            raise internal(f"cannot use '{location.url}': {_describe(error)[1]}") from error

    def _options(self) -> dict[str, Any]:
        """What holds for all requests of the library."""
        settings, environment = self.settings, os.environ
        given = [*map(settings.get, _ENDPOINTS), *map(environment.get, _S3_ENDPOINTS)]
        endpoint = next(filter(None, given), "")
        emulated = environment.get("AZURE_STORAGE_USE_EMULATOR") is not None
        return {
            "client_options": {
                "timeout": _PER_REQUEST,
                "connect_timeout": timedelta(seconds=min(_CONNECT_SECONDS, self._stall_seconds)),
                "read_timeout": timedelta(seconds=self._stall_seconds),
                "allow_http": endpoint.startswith("http://") or emulated,
            },
            "retry_config": {"max_retries": 0},  # all retries are in `_retry`
        }

    async def list(self, folder: str = "") -> list[StoredObject]:
        """All objects, or those below a folder. Raises HostError UNAVAILABLE or INTERNAL.

        The library refuses a listing with a key that is no path, such as one with `//`. Those of S3
        are then read without it, and have also such keys. In other stores, each folder is listed,
        and only the one with such a key has nothing but that key, with the size `UNLISTED`.
        """
        self.open()
        what = f"list '{self.location.object_url(folder) if folder else self.location.url}'"
        try:
            try:
                if self._has_odd_keys:
                    return [*await self._list_all_keys(folder, what)]
                return [*await self._list_by_library(folder, what)]
            except _RefusedKey as error:
                if self.location.kind == S3:
                    self._has_odd_keys = True
                    return [*await self._list_all_keys(folder, what)]
                if folder:
                    return [StoredObject(self._refused_path(error, folder), UNLISTED, "", "", 0.0)]
                return [*await self._list_by_folder(what)]
        except _RefusedKey as error:
            raise unavailable(f"failed to {what}: {error}") from None

    def _refused_path(self, error: _RefusedKey, folder: str) -> str:
        """The path of a key that the library refuses."""
        named = _NAMED_KEY.search(str(error))
        path = named[1].removeprefix(f"{self.location.prefix}/") if named else ""
        return path if path.startswith(f"{folder}/") else f"{folder}//"

    async def _list_by_folder(self, what: str) -> Iterable[StoredObject]:
        """All objects, by a listing for each folder. Raises HostError, or _RefusedKey."""

        async def read_once(progress: Callable[[], None]) -> Any:
            with self._refusals():
                return await self._client.list_with_delimiter_async()

        level = await self._retry(what, read_once)
        found = [*map(_stored_object, level["objects"])]
        limit = asyncio.Semaphore(_LISTINGS)

        async def list_folder(folder: str) -> None:
            async with limit:
                found.extend(await self.list(folder))

        await run_all(map(list_folder, level["common_prefixes"]))
        return found

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raises _RefusedKey if the library refuses a key."""
        try:
            yield
        except self._failure as error:
            if type(error).__name__ == "InvalidPathError":
                raise _RefusedKey(_describe(error)[1]) from None
            raise

    async def _list_by_library(self, folder: str, what: str) -> Iterable[StoredObject]:
        most = 0

        async def list_once(progress: Callable[[], None]) -> list[StoredObject]:
            nonlocal most
            found: list[StoredObject] = []
            with self._refusals():
                async for chunk in self._client.list(folder or None):
                    found += map(_stored_object, chunk)
                    # Each try begins anew: the same pages again are no progress.
                    if len(found) > most:
                        most = len(found)
                        progress()
            return found

        return await self._retry(what, list_once)

    async def _list_all_keys(self, folder: str, what: str) -> Iterable[StoredObject]:
        """The objects in a bucket of S3, by requests of our own. Raises HostError."""
        found: list[StoredObject] = []
        below = "".join(f"{part}/" for part in (self.location.prefix, folder) if part)
        token = ""
        while True:
            query = {"list-type": "2", "encoding-type": "url", "prefix": below}
            query.update({"continuation-token": token} if token else {})

            async def read_once(
                progress: Callable[[], None], query: Mapping[str, str] = query
            ) -> tuple[list[StoredObject], str]:
                url = await self._listing_url(query)
                body, _ = await self._send(what, "GET", url)
                try:
                    return _parse_page(body, self.location)
                except (ElementTree.ParseError, ValueError) as error:
                    raise _Incomplete(f"GET returned no listing: {error}") from None

            objects, token = await self._retry(what, read_once)
            found += objects
            if not token:
                return found

    async def _listing_url(self, query: Mapping[str, str]) -> str:
        """The URL of a listing, signed by the library: as that of an object, after the query."""
        from obstore import sign_async

        bucket, options = self.location.bucket, self._options()
        if not self._bucket_url:
            # The library knows the server best. With keys, even false ones, it asks for none.
            keys = {"access_key_id": "-", "secret_access_key": "-"}
            signer = _open_s3(bucket, {**self.settings, **keys}, options)
            url = (await sign_async(signer, "GET", "x", _SIGNED)).partition("?")[0]
            base = url.removesuffix("/x")
            self._bucket_url = base if urlsplit(base).path else f"{base}/"
        url = f"{self._bucket_url}?{urlencode(query, quote_via=quote)}"
        if self.settings.get("skip_signature"):
            return url
        settings = {
            **self.settings,
            "aws_endpoint_url_s3": f"{url}&x-end=",
            "virtual_hosted_style_request": True,
        }
        options["client_options"]["allow_http"] = url.startswith("http://")
        signer = _open_s3(bucket, settings, options)
        return await sign_async(signer, "GET", "x", _SIGNED)

    async def read(self, stored: StoredObject, slots: Slots) -> bytes:
        """The content of a small object. Raises HostError; ObjectChanged if it is another one."""
        self.open()

        async def read_once(progress: Callable[[], None]) -> bytes:
            parts = [chunk async for chunk in self._stream(stored, 0, stored.size)]
            return b"".join(parts)

        content = b""
        if stored.size:
            async with slots.parts:
                content = await self._retry(self._reading(stored), read_once)
        if self._has_digest(stored):
            digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
            await self._check_digest(stored, digest)
        return content

    async def fetch(
        self, stored: StoredObject, path: Path, slots: Slots, on_bytes: Callable[[int], None]
    ) -> None:
        """Writes an object to a file, which exists when it is complete and checked.

        `on_bytes` is called with the number of bytes that have been written. Raises HostError, as
        `read`, or OSError.
        """
        self.open()
        async with slots.files:
            # A name of its own, as a cancelled fetch of the same object may still end.
            file, fresh = _make_file(path)
            try:
                await self._fetch_file(stored, file, slots, on_bytes)
                fresh.rename(path)
            finally:
                fresh.unlink(missing_ok=True)

    async def _fetch_file(
        self, stored: StoredObject, file: int, slots: Slots, on_bytes: Callable[[int], None]
    ) -> None:
        """Writes an object to an open file, and closes it."""
        try:
            starts = range(0, stored.size, PART_BYTES)
            await run_all(self._fetch_part(stored, file, at, slots, on_bytes) for at in starts)
            if self._has_digest(stored):
                await self._check_digest(stored, await run_in_thread(lambda: _md5(file)))
            os.fchmod(file, 0o444)  # models of several servers may be links to it
        finally:
            os.close(file)

    async def _fetch_part(
        self,
        stored: StoredObject,
        file: int,
        start: int,
        slots: Slots,
        on_bytes: Callable[[int], None],
    ) -> None:
        end = min(start + PART_BYTES, stored.size)
        position = start

        async def fetch_rest(progress: Callable[[], None]) -> None:
            nonlocal position
            async for chunk in self._stream(stored, position, end):
                await run_in_thread(partial(write_all, file, chunk, position))
                position += len(chunk)
                on_bytes(len(chunk))
                progress()

        async with slots.parts:
            await self._retry(self._reading(stored), fetch_rest)

    async def _stream(self, stored: StoredObject, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes of a range. Raises HostError if the object is another one than was listed."""
        options: dict[str, Any] = {}
        if stored.etag:
            options["if_match"] = f'"{stored.etag}"'
        if (start, end) != (0, stored.size):
            options["range"] = (start, end)
        result = await self._client.get_async(stored.path, options=options)
        meta = result.meta
        if meta["size"] != stored.size or (stored.etag and _strip(meta["e_tag"]) != stored.etag):
            raise self._changed(stored)
        left = end - start
        async for chunk in result.stream(_CHUNK_BYTES):
            left -= len(chunk)
            if left < 0:
                break
            yield chunk
        if left:
            received = end - start - left
            raise _Incomplete(f"the store sent {received} of {end - start} bytes")

    def _reading(self, stored: StoredObject) -> str:
        return f"read '{self.location.object_url(stored.path)}'"

    def _changed(self, stored: StoredObject) -> ObjectChanged:
        url = self.location.object_url(stored.path)
        return ObjectChanged(f"'{url}' has changed since it was listed")

    def _has_digest(self, stored: StoredObject) -> bool:
        """Whether the ETag may be an MD5 digest of the content."""
        return self.location.kind == S3 and _MD5.fullmatch(stored.etag) is not None

    async def _check_digest(self, stored: StoredObject, digest: str) -> None:
        """Raises HostError INTERNAL if the ETag is an MD5 digest, and not this one."""
        if stored.etag != digest and not await self._is_encrypted(stored):
            raise internal(
                f"'{self.location.object_url(stored.path)}' has other bytes than the store lists:"
                f" their MD5 digest is {digest}, expected {stored.etag}"
            )

    async def _is_encrypted(self, stored: StoredObject) -> bool:
        """Whether the store encrypts an object with a key of KMS: then its ETag is no digest.

        Raises HostError.
        """
        import obstore

        if self.settings.get("skip_signature"):  # such objects cannot be read without credentials
            return False
        what = f"read the encryption of '{self.location.object_url(stored.path)}'"

        async def read_once(progress: Callable[[], None]) -> Message:
            url = await obstore.sign_async(self._client, "HEAD", stored.path, _SIGNED)
            return (await self._send(what, "HEAD", url))[1]

        headers = await self._retry(what, read_once)
        return (headers.get("x-amz-server-side-encryption") or "").startswith("aws:kms")

    async def _send(self, what: str, method: str, url: str) -> tuple[bytes, Message]:
        """The body and the header of a response. Raises HostError, or _Incomplete."""
        try:
            return await asyncio.to_thread(_send, method, url, self._stall_seconds)
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in _RETRIED:
                raise unavailable(f"failed to {what}: {method} returned {error.code}") from None
            raise _Incomplete(f"{method} returned {error.code}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Incomplete(f"{method} failed: {error}") from None

    async def _retry(
        self, what: str, run_once: Callable[[Callable[[], None]], Coroutine[Any, Any, _Result]]
    ) -> _Result:
        """Runs something until it succeeds; the deadline begins again with each byte received."""
        began = time.monotonic()

        def progress() -> None:
            nonlocal began
            began = time.monotonic()

        pause = _FIRST_PAUSE
        while True:
            try:
                return await run_once(progress)
            except FileNotFoundError as error:
                if error.errno is not None:
                    raise  # of the cache; that of the library has no number
                raise ObjectChanged(f"failed to {what}: it no longer exists") from None
            except (self._failure, _Incomplete) as error:
                status, cause = _describe(error)
                if status == 412:
                    raise ObjectChanged(
                        f"failed to {what}: it has changed since it was listed"
                    ) from None
                waited = time.monotonic() - began
                refused = status is not None and status < 500 and status not in _RETRIED
                if refused or type(error).__name__ == "NotSupportedError":
                    raise unavailable(f"failed to {what}: {cause}") from None
                if waited + pause > self._stall_seconds:
                    raise unavailable(
                        f"failed to {what} within {self._stall_seconds:g} s: {cause}"
                    ) from None
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _MAX_PAUSE)


class _Incomplete(Exception):
    """The store sent less than it should."""


class _RefusedKey(Exception):
    """A listing has a key that is no path."""


def _open_s3(bucket: str, settings: Settings, options: Mapping[str, Any]) -> Any:
    """A client of S3."""
    import obstore.store

    stores: Any = obstore.store
    if {"access_key_id", "secret_access_key"} <= settings.keys():
        # The library would add a token of the environment, which is of other keys.
        keys = _s3_keys(settings)
        options = {**options, "credential_provider": lambda: keys}
    return stores.S3Store(bucket, config=settings, **options)


def _s3_keys(settings: Settings) -> dict[str, Any]:
    """Keys as the library takes them from a provider of credentials."""
    return {
        "access_key_id": settings["access_key_id"],
        "secret_access_key": settings["secret_access_key"],
        "token": settings.get("session_token"),
        "expires_at": None,
    }


def _stored_object(meta: Any) -> StoredObject:
    return StoredObject(
        meta["path"],
        meta["size"],
        _strip(meta["e_tag"]),
        meta["version"] or "",
        meta["last_modified"].timestamp(),
    )


def _parse_page(body: bytes, location: StoreLocation) -> tuple[list[StoredObject], str]:
    """The objects of a page of S3, and the token of the next. Raises ParseError, ValueError."""
    page = ElementTree.fromstring(body)
    # Not all servers encode keys when they are asked to.
    decode = unquote_plus if page.findtext("{*}EncodingType") == "url" else str
    found = [_parse_entry(entry, location, decode) for entry in page.iterfind("{*}Contents")]
    return found, page.findtext("{*}NextContinuationToken") or ""


def _parse_entry(
    entry: ElementTree.Element, location: StoreLocation, decode: Callable[[str], str]
) -> StoredObject:
    """An object in a listing of S3, with the path that the library would give it."""
    said = {name: entry.findtext(f"{{*}}{name}") or "" for name in _ENTRY}
    path = decode(said["Key"])
    if location.prefix:
        path = path.removeprefix(f"{location.prefix}/")
    changed = datetime.fromisoformat(said["LastModified"].replace("Z", "+00:00")).timestamp()
    etag = _strip(said["ETag"])
    return StoredObject(path.removesuffix("/"), int(said["Size"]), etag, "", changed)


def _strip(etag: str | None) -> str:
    """An ETag without its quotes, which some stores leave out in listings."""
    return (etag or "").strip('"')


def _describe(error: Exception) -> tuple[int | None, str]:
    """The HTTP status of an error of the library, and what it says in one line."""
    text = str(error).split("\n\nDebug source", 1)[0]
    status = _STATUS.search(text)
    said = dict(_ELEMENTS.findall(text))
    if status is not None:
        head = text[: status.end()].rpartition(" - Server returned")[0]
        request = re.search(r"performing ([A-Z]+ [^ ]+)", head)
        text = f"{request[1] if request else 'the server'} returned {status[0][13:]}"
        if said:
            text += f" ({': '.join(filter(None, (said.get('Code'), said.get('Message'))))})"
    return None if status is None else int(status[1]), " ".join(text.split())


def _send(method: str, url: str, seconds: float) -> tuple[bytes, Message]:
    """The body and the header of a response. Blocks. Raises OSError or HTTPException."""
    request = urllib.request.Request(url, method=method)
    with urllib.request.urlopen(request, timeout=seconds) as response:
        headers: Message = response.headers
        return response.read(), headers


def _make_file(path: Path) -> tuple[int, Path]:
    """Opens a new file beside `path`."""
    file, name = tempfile.mkstemp(NEW, f"{path.name}.", path.parent)
    return file, Path(name)


def write_all(file: int, chunk: bytes, position: int) -> None:
    """Writes a chunk; a full file system takes only a part of it, and fails after that."""
    left = memoryview(chunk)
    while left:
        written = os.pwrite(file, left, position)
        left, position = left[written:], position + written


def _md5(file: int) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    buffer = bytearray(_CHUNK_BYTES)
    position = 0
    while read := os.preadv(file, [buffer], position):
        digest.update(memoryview(buffer)[:read])
        position += read
    return digest.hexdigest()
