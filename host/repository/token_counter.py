"""Counts the tokens of texts by the `tokenizer.json` of a model (docs/how-to/openai.md, Usage)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from host.config.model_config import ModelConfig
from host.config.openai_parameters import TOKENIZER, openai_parameter
from host.repository.chat_template import tokenizer_folders
from host.system.regular_file import check_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE = "tokenizer.json"
_MAX_BYTES = 256 << 20
_MAX_CHARACTERS = 1 << 20
"""Characters of a text that is counted. Counting takes about 100 bytes of memory for each."""


class TokenCounter:
    """Counts tokens by a tokenizer. Usable from several threads at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def count(self, text: str, special_tokens: bool) -> int | None:
        """Return the number of tokens of a text; None if it has too many characters. Blocks.

        `special_tokens`: whether the tokenizer adds those that it puts around a prompt.
        """
        if len(text) > _MAX_CHARACTERS:
            return None
        return len(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)


def read_token_counter(directory: Path, version: int, config: ModelConfig) -> TokenCounter | None:
    """Return the token counter of a version; None if it has no tokenizer. Blocks.

    The file of `OPENAI_TOKENIZER` comes first, then `tokenizer.json` in the folders of the chat
    template. Raises ValueError if the file cannot be used.
    """
    chosen = openai_parameter(config, TOKENIZER)
    if chosen == "off":
        return None
    try:
        path = _find_file(directory, version, config, chosen)
        return None if path is None else TokenCounter(_load(path))
    except OSError as error:
        name = chosen or Path(str(error.filename)).name
        reason = f"cannot read '{name}': {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise ValueError(f"{TOKENIZER} of model '{config.name}': {reason}")


def _find_file(directory: Path, version: int, config: ModelConfig, chosen: str) -> Path | None:
    if chosen:
        path = (directory / chosen).resolve()
        if not path.is_relative_to(directory.resolve()):
            raise ValueError(f"'{chosen}' lies outside of the model's folder")
        return path
    paths = (folder / _FILE for folder in tokenizer_folders(directory, version, config))
    return next((path for path in paths if path.exists()), None)


def _load(path: Path) -> Tokenizer:
    check_regular(path)
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"'{path.name}' has more than {_MAX_BYTES} bytes")
    text = path.read_text(encoding="utf-8")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(
            f"'{path.name}' needs the package tokenizers, which is not installed:"
            " pip install 'pbhost[tokenizers]'"
        ) from None
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the package raises this very class
        raise ValueError(f"'{path.name}' is damaged: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
