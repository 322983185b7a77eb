"""Config parameters that split the requests to a model between two of its versions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from host.config.findings import Finding, Findings
from host.config.schema import ModelConfig

CANARY_PARAMETER = "CANARY"
"""The parameter with the version that gets a share of the requests, and the share in percent."""

SHADOW_PARAMETER = "SHADOW"
"""The parameter with the version that gets copies of a share of the requests, and the share."""

_SHARE = re.compile(r"([0-9]{1,18}):([0-9]{1,3}(?:\.[0-9]{1,6})?)")


@dataclass(frozen=True, slots=True)
class TrafficShare:
    """The share of the requests that a version gets. `percent`: above 0, up to 100."""

    version: int
    percent: float


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """How the requests that name no version are split. `canary` answers them, `shadow` does not."""

    canary: TrafficShare | None = None
    shadow: TrafficShare | None = None


def traffic_settings(config: ModelConfig) -> TrafficSettings:
    """The settings of a checked configuration."""
    return TrafficSettings(_share(config, CANARY_PARAMETER), _share(config, SHADOW_PARAMETER))


def check_traffic_parameters(config: ModelConfig) -> Findings:
    """Checks that the parameters that are set have valid values."""
    for parameter in (CANARY_PARAMETER, SHADOW_PARAMETER):
        if parameter in config.parameters and _share(config, parameter) is None:
            text = config.parameters[parameter].string_value
            yield Finding(
                f"parameter '{parameter}' of model '{config.name}' must be <version>:<percent>,"
                f" with a percentage above 0 and up to 100, got '{text[:100]}'",
                f"parameters[{parameter}]",
            )


def is_percentage(percent: float) -> bool:
    """Whether a number can be the percentage of a share."""
    return math.isfinite(percent) and 0 < percent <= 100


def _share(config: ModelConfig, parameter: str) -> TrafficShare | None:
    """The share of a parameter; None if it is not set, or invalid."""
    if parameter not in config.parameters:
        return None
    found = _SHARE.fullmatch(config.parameters[parameter].string_value.strip())
    if found is None or not is_percentage(float(found[2])):
        return None
    return TrafficShare(int(found[1]), float(found[2]))
