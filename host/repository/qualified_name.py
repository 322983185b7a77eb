"""Qualified names of models: the name, or with namespaces the repository and the name."""

from __future__ import annotations

_SEPARATOR = "::"


def qualified_name(namespace: str, name: str) -> str:
    """The key of a model in the server, and its name in the log; without a namespace its name."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def split_qualified_name(known: str) -> tuple[str, str]:
    """Namespace and name of a qualified name. With namespaces, names contain no `::`."""
    namespace, _, name = known.rpartition(_SEPARATOR)
    return namespace, name


def is_valid_model_name(name: str) -> bool:
    """Whether a model in a namespace can have this name."""
    return _SEPARATOR not in name
