"""Limits the texts of errors, which models make of anything."""

MAX_ERROR_CHARACTERS = 65536
"""Characters of an error's text that are kept."""


def limit_error_text(text: str) -> str:
    """Returns the text, cut to MAX_ERROR_CHARACTERS; then its end says how much is cut."""
    cut = len(text) - MAX_ERROR_CHARACTERS
    return text if cut <= 0 else f"{text[:MAX_ERROR_CHARACTERS]}... ({cut} more characters)"
