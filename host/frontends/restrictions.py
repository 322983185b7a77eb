"""Requests that only those may make who know a secret: which ones, and how it is shown."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping


class Restrictions:
    """What a door lets pass (protocol spec 1.9, 2.1).

    `restricted` has, by category, a header and the value that it must have; a header is called
    `prefix` and the name given there.
    """

    def __init__(self, restricted: Mapping[str, tuple[str, str]], prefix: str = "") -> None:
        self._restricted = {
            category: (f"{prefix}{key}", value.encode("utf-8", "surrogateescape"))
            for category, (key, value) in restricted.items()
        }

    def __contains__(self, category: str) -> bool:
        return category in self._restricted

    def required_headers(self) -> dict[str, str]:
        """The header that opens each restricted category."""
        return {category: name for category, (name, _) in self._restricted.items()}

    def missing_header(
        self, category: str, get_header: Callable[[str], str | bytes | None]
    ) -> str | None:
        """The header that a request of this category should have had; None if it may pass.

        `get_header` looks up what the client has sent by a name in lowercase.
        """
        restriction = self._restricted.get(category)
        if restriction is None:
            return None
        name, wanted = restriction
        sent = get_header(name.lower())
        if isinstance(sent, str):
            sent = sent.encode("utf-8", "surrogateescape")
        # How long the comparison takes tells nobody how much of a guess was right.
        return None if sent is not None and hmac.compare_digest(sent, wanted) else name


UNRESTRICTED = Restrictions({})
