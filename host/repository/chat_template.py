"""Reads the chat template of a model from its folder (docs/how-to/openai.md, Chat templates)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from host.config.model_config import ModelConfig
from host.system.regular_file import check_regular

BUILT_IN_TEMPLATES = ("chatml", "plain", "last")
"""The values of `OPENAI_CHAT_TEMPLATE` that name no file."""

_PARAMETER = "OPENAI_CHAT_TEMPLATE"
_MAX_BYTES = 8 << 20  # of a template, and of tokenizer_config.json


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
    """Return the chat template of a version; None if it has none. Blocks.

    The file of the parameter comes first, then `chat_template.jinja` and `tokenizer_config.json` of
    the version and of the model; for the vLLM backend, also those of the tokenizer in `model.json`.
    A file that cannot be read is a complaint and does not fail.
    """
    parameters = config.parameters
    chosen = parameters[_PARAMETER].string_value.strip() if _PARAMETER in parameters else ""
    if chosen in BUILT_IN_TEMPLATES:
        return None
    folders: Sequence[Path] = (directory / str(version), directory)
    try:
        if chosen:
            path = (directory / chosen).resolve()
            if not path.is_relative_to(directory.resolve()):
                return _complaint(config, f"'{chosen}' lies outside of the model's folder")
            return ChatTemplate(_read(path), "", _special_tokens(folders), file=chosen)
        folders = tokenizer_folders(directory, version, config)
        for folder in folders:
            if (folder / "chat_template.jinja").exists():
                text = _read(folder / "chat_template.jinja")
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
    """Return the folders that may have the files of a tokenizer, the first one first. Blocks.

    Raises OSError or ValueError if `model.json` of a vLLM model cannot be read.
    """
    folders = [directory / str(version), directory]
    return folders + (_vllm_folders(folders[0]) if config.backend == "vllm" else [])


def _complaint(config: ModelConfig, reason: str) -> ChatTemplate:
    return ChatTemplate(complaint=f"{_PARAMETER} of model '{config.name}': {reason}")


def _read(path: Path) -> str:
    check_regular(path)
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    return path.read_text(encoding="utf-8")


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    document = json.loads(_read(path))
    return document if isinstance(document, dict) else {}


def _named_templates(folder: Path) -> dict[str, str]:
    """Return the templates of tokenizer_config.json by name; a single one is `default`."""
    templates = _tokenizer_config(folder).get("chat_template")
    if isinstance(templates, str):
        return {"default": templates}
    return {
        str(entry.get("name")): entry["template"]
        for entry in (templates if isinstance(templates, list) else ())
        if isinstance(entry, dict) and isinstance(entry.get("template"), str)
    }


def _vllm_folders(version_folder: Path) -> list[Path]:
    """Return the folder of the tokenizer of a vLLM model, if it is on the disk.

    `model.json` names a folder, or a repository of Hugging Face, whose newest snapshot in the cache
    counts.
    """
    path = version_folder / "model.json"
    arguments = json.loads(_read(path)) if path.exists() else None
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
    """Return `bos_token` and the like of tokenizer_config.json: texts, or objects of a text."""
    tokens: dict[str, str] = {}
    for folder in reversed(folders):
        for name, value in _tokenizer_config(folder).items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                tokens[name] = content
    return tokens
