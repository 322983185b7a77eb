"""Which names a model may have, depending on where the name comes from."""

from __future__ import annotations

from host.config.findings import Finding, Findings
from host.config.schema import ModelConfig
from host.errors import invalid_argument

# Names end up in the command line and the environment of a stub (pb_utils specification 1.5).
_FORBIDDEN_CHARACTERS = frozenset(";|&$`<>()[]{}\\\"'*?~#!")


def check_directory_name(config: ModelConfig, directory: str) -> Findings:
    """A model is called like its directory (configuration spec 1.4)."""
    if config.name != directory:
        yield Finding(
            f"unexpected directory name '{directory}' for model '{config.name}', "
            "directory name must equal model name",
            "name",
        )


def check_names_for_stub(config: ModelConfig) -> Findings:
    """A stub is called like its model or its instance, so neither may hold shell characters."""
    named = [(config.name, "name")]
    named += [(g.name, f"instance_group[{i}].name") for i, g in enumerate(config.instance_group)]
    for name, field in named:
        if not name or not _FORBIDDEN_CHARACTERS.isdisjoint(name):
            yield Finding("Invalid stub name: contains invalid characters", field)


def checked_load_name(name: str) -> str:
    """The model name that a load request means. Raises INVALID_ARG if it cannot be one."""
    trimmed = name.strip()
    if not trimmed:
        raise invalid_argument("Model name cannot be empty. Please enter a valid name to deploy.")
    if trimmed == ".." or "/" in trimmed:
        raise invalid_argument(
            f"invalid model name '{trimmed}', model name must not contain path traversal characters"
        )
    return trimmed
