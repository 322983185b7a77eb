"""Repository agents, which check a model's files before it is loaded.

Source: docs/reference/configuration-and-scheduling.md, "Repository agents".
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from host.config.schema import ModelConfig
from host.errors import invalid_argument
from host.system.regular_file import read_file

_MD5 = "MD5:"


def run_agents(config: ModelConfig, directory: Path, installed: str) -> None:
    """Runs every agent that the configuration names on the model directory. Blocks.

    `installed`: the directory where Triton would look for agents. Raises HostError if an agent
    refuses the model, or if there is no such agent here.
    """
    for agent in config.model_repository_agents.agents:
        if agent.name != "checksum":
            raise invalid_argument(
                f"unable to find 'libtritonrepoagent_{agent.name}.so' for repo agent"
                f" '{agent.name}', searched: {installed}"
            )
        for key, digest in sorted(agent.parameters.items()):
            _check(key, digest, directory)


def _check(key: str, expected: str, directory: Path) -> None:
    name = key.removeprefix(_MD5)
    if name == key or not name:
        raise invalid_argument(
            f"repo agent 'checksum' takes parameters named '{_MD5}<file>', got '{key}'"
        )
    path = Path(os.path.normpath(directory / name))
    if not path.is_relative_to(os.path.normpath(directory)):
        raise invalid_argument(f"repo agent 'checksum': file {name} is outside model directory")
    try:
        found = hashlib.md5(read_file(path), usedforsecurity=False).hexdigest()
    except OSError as error:
        raise invalid_argument(
            f"repo agent 'checksum': failed to read file {name}: {error.strerror}"
        ) from None
    if found != expected.lower():
        raise invalid_argument(
            f"Mismatched MD5 hash for file {name}, expect: {expected}, got: {found}"
        )
