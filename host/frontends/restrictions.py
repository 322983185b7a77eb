"""Access control: restricted categories of requests, and the headers that allow them."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping


class Restrictions:
    """The restrictions of one endpoint.

    `restricted`: by category, the name and the value of the required header; `prefix` is put before
    the name. Source: docs/reference/protocol.md, "Compression, size limits, forwarded headers,
    restricted endpoints" and "Methods".
    """

    def __init__(self, restricted: Mapping[str, tuple[str, str]], prefix: str = "") -> None:
        self._restricted = {
            category: (f"{prefix}{key}", value.encode("utf-8", "surrogateescape"))
            for category, (key, value) in restricted.items()
        }

    def __contains__(self, category: str) -> bool:
        return category in self._restricted

    def required_headers(self) -> dict[str, str]:
        """The required header of each restricted category."""
        return {category: name for category, (name, _) in self._restricted.items()}

    def missing_header(
        self, category: str, get_header: Callable[[str], str | bytes | None]
    ) -> str | None:
        """Returns the header that a request of this category lacks, None if the request is allowed.

        `get_header` returns a header of the client by its lowercase name.
        """
        restriction = self._restricted.get(category)
        if restriction is None:
            return None
        name, wanted = restriction
        sent = get_header(name.lower())
        if isinstance(sent, str):
            sent = sent.encode("utf-8", "surrogateescape")
        # A comparison in constant time does not reveal how much of the value is right.
        return None if sent is not None and hmac.compare_digest(sent, wanted) else name


UNRESTRICTED = Restrictions({})
