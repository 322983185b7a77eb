"""What headers of requests do: allow restricted endpoints, become parameters of models."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping

from host.errors import invalid_argument
from host.inference.request import Parameter
from host.options.validators import header_pattern


class Restrictions:
    """The restrictions of one endpoint.

    `restricted`: by category, the name and the value of the required header; `prefix` is put before
    the name. Source: docs/reference/http.md, "Compression, size limits, forwarded headers,
    restricted endpoints", and docs/reference/grpc.md, "Methods".
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


Header = tuple[str | bytes, str | bytes]
"""The name of a header, in the case that the client sent, and its value."""

_RESERVED = frozenset(
    "sequence_id sequence_start sequence_end priority timeout headers binary_data_output".split()
)
_RESERVED_PREFIX = "triton_"


class HeaderForwarding:
    """Selects the headers whose names match a pattern; an empty pattern selects none.

    Source: docs/reference/http.md, "Compression, size limits, forwarded headers, restricted
    endpoints", and docs/reference/grpc.md, "Connections and options". Raises InvalidValue for an
    invalid pattern.
    """

    def __init__(self, pattern: str = "") -> None:
        self._search = header_pattern(pattern).search if pattern else None

    def __bool__(self) -> bool:
        return self._search is not None

    def to_parameters(self, headers: Iterable[Header]) -> dict[str, Parameter]:
        """Converts the selected headers to parameters; of equal names, the last one counts.

        Raises HostError INVALID_ARG if a selected header has the name of a reserved parameter.
        """
        picked: dict[str, Parameter] = {}
        if self._search is not None:
            for raw, value in headers:
                name = _to_str(raw)
                if self._search(name):
                    if name in _RESERVED or name.startswith(_RESERVED_PREFIX):
                        raise invalid_argument(
                            f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
                        )
                    picked[name] = _to_str(value)
        return picked


def _to_str(raw: str | bytes) -> str:
    # Parameters are text, so bytes that are not UTF-8 are replaced.
    return raw if isinstance(raw, str) else raw.decode("utf-8", "replace")


NO_FORWARDED_HEADERS = HeaderForwarding()
