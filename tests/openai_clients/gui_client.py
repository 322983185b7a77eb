"""Asks the page of examples/gui: `gui_client.py URL IMAGE`; prints the answer as JSON."""

from __future__ import annotations

import json
import sys

from gradio_client import Client, handle_file
from PIL import Image


def main(url: str, image: str) -> None:
    """Prints the digits, the colour of the boxes found, and the error for a missing image."""
    client = Client(url, verbose=False)
    digits, boxes = client.predict(handle_file(image), api_name="/read")
    with Image.open(boxes) as marked:
        pixels = marked.convert("RGB")
        red = sum(red > 180 and green < 110 for red, green, _ in pixels.get_flattened_data())
    try:
        client.predict(None, api_name="/read")
        error = ""
    except Exception as raised:  # of any kind: its text is printed
        error = str(raised)
    print(json.dumps({"digits": digits, "has_boxes": red > 100, "error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
