"""Checks model names: in a configuration, for a stub process, and in a load request."""

from __future__ import annotations

from host.config.findings import Finding, Findings
from host.config.schema import ModelConfig
from host.errors import invalid_argument

# Names are passed to stub processes on the command line (docs/reference/model-api.md, "Names of
# models and instance groups").
_FORBIDDEN_CHARACTERS = frozenset(";|&$`<>()[]{}\\\"'*?~#!")


def check_directory_name(config: ModelConfig, directory: str) -> Findings:
    """Checks that the model is named like its directory
    (docs/reference/configuration-and-scheduling.md, "Names").
    """
    if config.name != directory:
        yield Finding(
            f"unexpected directory name '{directory}' for model '{config.name}', "
            "directory name must equal model name",
            "name",
        )


def check_names_for_stub(config: ModelConfig) -> Findings:
    """Checks that the names of the model and its instance groups have no shell characters."""
    named = [(config.name, "name")]
    named += [(g.name, f"instance_group[{i}].name") for i, g in enumerate(config.instance_group)]
    for name, field in named:
        if not name or not _FORBIDDEN_CHARACTERS.isdisjoint(name):
            yield Finding("Invalid stub name: contains invalid characters", field)


def checked_load_name(name: str) -> str:
    """The model name in a load request, without outer spaces. Raises HostError INVALID_ARG."""
    trimmed = name.strip()
    if not trimmed:
        raise invalid_argument("Model name cannot be empty. Please enter a valid name to deploy.")
    if trimmed == ".." or "/" in trimmed:
        raise invalid_argument(
            f"invalid model name '{trimmed}', model name must not contain path traversal characters"
        )
    return trimmed
