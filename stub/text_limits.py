"""Limits the texts of errors and log lines, which models make of anything."""

MAX_TEXT_CHARACTERS = 65536
"""Characters of a text that are kept."""


def limit_text(text: str) -> str:
    """Returns the text, cut to MAX_TEXT_CHARACTERS; then its end says how much is cut."""
    cut = len(text) - MAX_TEXT_CHARACTERS
    return text if cut <= 0 else f"{text[:MAX_TEXT_CHARACTERS]}... ({cut} more characters)"
