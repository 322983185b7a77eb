"""Reads the files of a model that the routes under /v1 use: chat template, tokenizer, adapters.

Source: docs/how-to/openai.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from host.config.parameters import LORA_SEPARATOR, TOKENIZER, openai_parameter
from host.config.schema import ModelConfig
from host.system.files import check_regular, read_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BUILT_IN_TEMPLATES = ("chatml", "plain", "last")
"""The values of `OPENAI_CHAT_TEMPLATE` that name no file."""

_TEMPLATE = "OPENAI_CHAT_TEMPLATE"
_MAX_TEMPLATE_BYTES = 8 << 20  # of a template, and of tokenizer_config.json
_TOKENIZER_FILE = "tokenizer.json"
_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_CHARACTERS = 1 << 20
"""Characters of a text that is counted. Counting takes about 100 bytes of memory for each."""
_ADAPTER_FILE = "multi_lora.json"
_MAX_ADAPTER_BYTES = 1 << 20


Render = Callable[[Mapping[str, Any]], str]
"""Renders a template with its variables. Blocks. Raises OpenAIError."""


@dataclass(slots=True)
class OpenAIFiles:
    """What the files of a loaded version give to the routes; an extension of the model.

    Attributes:
        template: How messages become a prompt; None if no file of the model says it.
        counter: Counts the tokens of texts; None if there is no tokenizer, or the model counts.
        adapters: The LoRA adapters that clients can name together with the model.
        renders: What renders the compiled texts of the template.
        timeouts: How often the template ran for too long.
        chat_refusal: Why the version does not do chat any more; "" if it may.
    """

    template: ChatTemplate | None = None
    counter: TokenCounter | None = None
    adapters: tuple[str, ...] = ()
    renders: dict[str, Render] = field(default_factory=dict)
    timeouts: int = 0
    chat_refusal: str = ""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template and the special tokens that it may use, or why it cannot be read.

    `tool_use_text` is the template for requests with tools; if it is "", `text` renders them too.
    `file` is the name of the file.
    """

    text: str = ""
    tool_use_text: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)
    complaint: str = ""
    file: str = ""


def read_chat_template(directory: Path, version: int, config: ModelConfig) -> ChatTemplate | None:
    """Returns the chat template of a version; None if it has none. Blocks.

    The file of the parameter comes first, then `chat_template.jinja` and `tokenizer_config.json` of
    the version and of the model; for the vLLM backend, also those of the tokenizer in `model.json`.
    A file that cannot be read is a complaint and does not fail.
    """
    parameters = config.parameters
    chosen = parameters[_TEMPLATE].string_value.strip() if _TEMPLATE in parameters else ""
    if chosen in BUILT_IN_TEMPLATES:
        return None
    folders: Sequence[Path] = (directory / str(version), directory)
    try:
        if chosen:
            path = (directory / chosen).resolve()
            if not path.is_relative_to(directory.resolve()):
                return _complaint(config, f"'{chosen}' lies outside of the model's folder")
            return ChatTemplate(_read_template(path), "", _special_tokens(folders), file=chosen)
        folders = tokenizer_folders(directory, version, config)
        for folder in folders:
            if (folder / "chat_template.jinja").exists():
                text = _read_template(folder / "chat_template.jinja")
                tokens = _special_tokens(folders)
                return ChatTemplate(text, "", tokens, file="chat_template.jinja")
            templates = _named_templates(folder)
            if "default" in templates:
                tool_use = templates.get("tool_use", "")
                tokens = _special_tokens(folders)
                file = "tokenizer_config.json"
                return ChatTemplate(templates["default"], tool_use, tokens, file=file)
    except OSError as error:
        name = chosen or Path(str(error.filename)).name
        return _complaint(config, f"cannot read '{name}': {error.strerror or error}")
    except (ValueError, RecursionError) as error:
        return _complaint(config, f"cannot read '{chosen or 'the chat template'}': {error}")
    return None


def tokenizer_folders(directory: Path, version: int, config: ModelConfig) -> list[Path]:
    """Returns the folders that may have the files of a tokenizer, the first one first. Blocks.

    Raises OSError or ValueError if `model.json` of a vLLM model cannot be read.
    """
    folders = [directory / str(version), directory]
    return folders + (_vllm_folders(folders[0]) if config.backend == "vllm" else [])


def _complaint(config: ModelConfig, reason: str) -> ChatTemplate:
    return ChatTemplate(complaint=f"{_TEMPLATE} of model '{config.name}': {reason}")


def _read_template(path: Path) -> str:
    check_regular(path)
    if path.stat().st_size > _MAX_TEMPLATE_BYTES:
        raise ValueError(f"it has more than {_MAX_TEMPLATE_BYTES} bytes")
    return path.read_text(encoding="utf-8")


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    document = json.loads(_read_template(path))
    return document if isinstance(document, dict) else {}


def _named_templates(folder: Path) -> dict[str, str]:
    """Returns the templates of tokenizer_config.json by name; a single one is `default`."""
    templates = _tokenizer_config(folder).get("chat_template")
    if isinstance(templates, str):
        return {"default": templates}
    return {
        str(entry.get("name")): entry["template"]
        for entry in (templates if isinstance(templates, list) else ())
        if isinstance(entry, dict) and isinstance(entry.get("template"), str)
    }


def _vllm_folders(version_folder: Path) -> list[Path]:
    """Returns the folder of the tokenizer of a vLLM model, if it is on the disk.

    `model.json` names a folder, or a repository of Hugging Face, whose newest snapshot in the cache
    counts.
    """
    path = version_folder / "model.json"
    arguments = json.loads(_read_template(path)) if path.exists() else None
    if not isinstance(arguments, dict):
        return []
    name = arguments.get("tokenizer") or arguments.get("model")
    if not isinstance(name, str) or not name:
        return []
    if Path(name).is_dir():
        return [Path(name)]
    snapshots = _hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    if not snapshots.is_dir():
        return []
    return sorted(snapshots.iterdir(), key=lambda folder: folder.stat().st_mtime)[-1:]


def _hub_cache() -> Path:
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := os.environ.get("HF_HOME"):
        return Path(home) / "hub"
    return Path("~/.cache/huggingface/hub").expanduser()


def _special_tokens(folders: Sequence[Path]) -> dict[str, str]:
    """Returns `bos_token` and the like of tokenizer_config.json: texts, or objects of a text."""
    tokens: dict[str, str] = {}
    for folder in reversed(folders):
        for name, value in _tokenizer_config(folder).items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                tokens[name] = content
    return tokens


class TokenCounter:
    """Counts tokens by a tokenizer. Several threads may use it at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def count(self, text: str, special_tokens: bool) -> int | None:
        """Returns the number of tokens of a text; None if it has too many characters. Blocks.

        `special_tokens`: whether the tokenizer adds those that it puts around a prompt.
        """
        if len(text) > _MAX_CHARACTERS:
            return None
        return len(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)


def read_token_counter(directory: Path, version: int, config: ModelConfig) -> TokenCounter | None:
    """Returns the token counter of a version; None if it has no tokenizer. Blocks.

    The file of `OPENAI_TOKENIZER` comes first, then `tokenizer.json` in the folders of the chat
    template. Raises ValueError if the file cannot be used.
    """
    chosen = openai_parameter(config, TOKENIZER)
    if chosen == "off":
        return None
    try:
        path = _find_tokenizer(directory, version, config, chosen)
        return None if path is None else TokenCounter(_load_tokenizer(path))
    except OSError as error:
        name = chosen or Path(str(error.filename)).name
        reason = f"cannot read '{name}': {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise ValueError(f"{TOKENIZER} of model '{config.name}': {reason}")


def _find_tokenizer(directory: Path, version: int, config: ModelConfig, chosen: str) -> Path | None:
    if chosen:
        path = (directory / chosen).resolve()
        if not path.is_relative_to(directory.resolve()):
            raise ValueError(f"'{chosen}' lies outside of the model's folder")
        return path
    paths = (folder / _TOKENIZER_FILE for folder in tokenizer_folders(directory, version, config))
    return next((path for path in paths if path.exists()), None)


def _load_tokenizer(path: Path) -> Tokenizer:
    check_regular(path)
    if path.stat().st_size > _MAX_TOKENIZER_BYTES:
        raise ValueError(f"'{path.name}' has more than {_MAX_TOKENIZER_BYTES} bytes")
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


def read_lora_adapters(directory: Path, version: int, config: ModelConfig) -> tuple[str, ...]:
    """Returns the names of the adapters in `multi_lora.json` of a version. Blocks.

    There are none without `OPENAI_LORA_SEPARATOR`. Raises ValueError if the file cannot be used.
    """
    if not openai_parameter(config, LORA_SEPARATOR):
        return ()
    path = directory / str(version) / _ADAPTER_FILE
    prefix = f"{LORA_SEPARATOR} of model '{config.name}'"
    try:
        if path.stat().st_size > _MAX_ADAPTER_BYTES:
            raise ValueError(f"it has more than {_MAX_ADAPTER_BYTES} bytes")
        document = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{prefix}: cannot read '{_ADAPTER_FILE}': {reason}") from None
    if not isinstance(document, dict):
        raise ValueError(
            f"{prefix}: '{_ADAPTER_FILE}' must be a JSON object of folders by adapter name"
        )
    return tuple(document)
