"""The URLs of repositories in object stores, in Triton's forms."""

from __future__ import annotations

import re
from dataclasses import dataclass

from host.errors import invalid_argument

S3, GCS, AZURE = "s3", "gs", "as"

_SCHEMES = (f"{S3}://", f"{GCS}://", f"{AZURE}://")
_FORMS = {
    S3: "s3://BUCKET/PREFIX, s3://HOST:PORT/BUCKET/PREFIX or s3://https://HOST:PORT/BUCKET/PREFIX",
    GCS: "gs://BUCKET/PREFIX",
    AZURE: "as://ACCOUNT/CONTAINER/PREFIX",
}
_BUCKET = re.compile(r"[\w.$-]+")
_S3_SERVER = re.compile(r"(https?)://(.*)|([^/]+:[0-9]+(?:/.*)?)")


def is_store_url(text: str) -> bool:
    """Whether the text names a place in an object store instead of a folder."""
    return text.startswith(_SCHEMES)


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A place in an object store.

    Attributes:
        url: As it was given, without slashes at its end.
        kind: `s3`, `gs` or `as`.
        bucket: The bucket, or the container of Azure.
        prefix: What the keys of all objects there begin with, without a slash at either end.
        endpoint: The URL of the server; "" is that of the provider.
        account: The account of Azure.
    """

    url: str
    kind: str
    bucket: str
    prefix: str
    endpoint: str = ""
    account: str = ""

    def object_url(self, path: str) -> str:
        """The URL of an object by its path below the prefix."""
        return f"{self.url}/{path}"

    @property
    def parent(self) -> tuple[StoreLocation, str]:
        """The location one level higher, and the name of this one there. Raises HostError."""
        head, _, name = self.prefix.rpartition("/")
        if not name:
            raise invalid_argument(f"'{self.url}' is a whole bucket, expected a model in it")
        url = self.url.removesuffix(f"/{name}")
        return StoreLocation(url, self.kind, self.bucket, head, self.endpoint, self.account), name


def parse_store_url(text: str) -> StoreLocation:
    """The location that a URL names. Raises HostError INVALID_ARG.

    As in Triton, a server of S3 that is given as HOST:PORT is spoken to without TLS.
    """
    kind, _, rest = text.partition("://")
    rest = rest.rstrip("/")
    url = f"{kind}://{rest}"
    endpoint = account = ""
    if kind == S3 and (server := _S3_SERVER.fullmatch(rest)):
        scheme = server[1] or "http"
        host, _, rest = (server[2] or server[3]).partition("/")
        endpoint = f"{scheme}://{host}" if host else ""
        rest = rest if host else ""
    elif kind == AZURE:
        account, _, rest = rest.partition("/")
        if "." in account:  # the host name of the account
            endpoint, account = f"https://{account}", account.partition(".")[0]
    bucket, _, prefix = rest.partition("/")
    segments = [segment for segment in prefix.split("/") if segment]
    complete = _BUCKET.fullmatch(bucket) and (account or kind != AZURE)
    if not complete or not {".", ".."}.isdisjoint(segments):
        raise invalid_argument(
            f"'{text}' is not the URL of a model repository, expected {_FORMS[kind]}"
        )
    return StoreLocation(url, kind, bucket, "/".join(segments), endpoint, account)
