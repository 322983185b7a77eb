"""Bodies of requests in JSON, with a limit of their size."""

from __future__ import annotations

from typing import Any

from host.errors import HostError, invalid_argument
from host.frontends.http import json_text as json
from host.frontends.http.exchange import HttpExchange


async def read_json_body(exchange: HttpExchange, max_size: int) -> bytes:
    """Returns the body of a request. Raises HostError if it has more than `max_size` bytes."""
    return await exchange.read_body(max_size, lambda size: json_too_large(size, max_size))


async def read_json_object(exchange: HttpExchange, max_size: int) -> dict[str, Any]:
    """Returns the body as a JSON object; an empty body, or other JSON, is an empty object.

    Raises HostError if it is not JSON, or has more than `max_size` bytes.
    """
    body = await read_json_body(exchange, max_size)
    document = json.parse(body) if body else {}
    return document if isinstance(document, dict) else {}


def json_too_large(size: int, most: int) -> HostError:
    """Returns the error for a JSON part of more than `most` bytes."""
    return invalid_argument(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {most}"
        " bytes. Use --http-max-input-size to increase the limit."
    )
