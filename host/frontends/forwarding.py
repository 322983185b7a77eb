"""Headers of an inference request that its model gets to see, as parameters of the request."""

from __future__ import annotations

from collections.abc import Iterable

from host.errors import invalid_argument
from host.inference.request import Parameter
from host.options.validators import header_pattern

Header = tuple[str | bytes, str | bytes]
"""Name, as the client has written it, and value."""

_RESERVED = frozenset(
    "sequence_id sequence_start sequence_end priority timeout headers binary_data_output".split()
)
_RESERVED_PREFIX = "triton_"


class HeaderForwarding:
    """Picks the headers whose names the pattern is found in (protocol spec 1.9, 2.6).

    An empty pattern picks none. Raises InvalidValue for one that is no regular expression.
    """

    def __init__(self, pattern: str = "") -> None:
        self._search = header_pattern(pattern).search if pattern else None

    def __bool__(self) -> bool:
        return self._search is not None

    def to_parameters(self, headers: Iterable[Header]) -> dict[str, Parameter]:
        """The parameters that these headers become; of several with one name, the last counts.

        Raises HostError INVALID_ARG if a picked one has a name that means something to the host.
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
    # Parameters are text on their way to a model; bytes that are no UTF-8 have no place in it.
    return raw if isinstance(raw, str) else raw.decode("utf-8", "replace")


NO_FORWARDED_HEADERS = HeaderForwarding()
