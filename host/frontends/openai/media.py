"""The images and sounds of messages, which are sent along as base64."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any

from host.frontends.openai.errors import invalid_value

SOURCE_OF_PART = {"image_url": "images", "input_audio": "audio"}
"""The source of inputs that takes a part of a message, by the type of the part."""

_IMAGE = re.compile(r"data:image/(?:png|jpeg|webp|gif);base64,")


def read_media(messages: list[Any], kind: str, as_base64: bool) -> list[str | bytes]:
    """Returns the images or the sounds of messages in their order; `kind` is a type of parts.

    They are bytes, or texts of base64. Raises OpenAIError if one is not base64.
    """
    media: list[str | bytes] = []
    for place, part in _parts(messages):
        if part["type"] != kind:
            continue
        if kind == "image_url":
            place, text = f"{place}.image_url.url", part["image_url"]["url"]
            head = _IMAGE.match(text)
            if head is None:
                raise invalid_value(
                    f"'{place}' must begin with data:image/png;base64, or have the type jpeg, webp"
                    " or gif",
                    place,
                )
            text = text[head.end() :]
        else:
            place, text = f"{place}.input_audio.data", part["input_audio"]["data"]
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise invalid_value(f"'{place}' must be base64", place) from None
        media.append(text if as_base64 else data)
    return media


def _parts(messages: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, message in enumerate(messages):
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            yield f"messages[{index}].content[{at}]", part
