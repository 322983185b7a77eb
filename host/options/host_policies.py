"""Host policies: CPUs and NUMA nodes of instances, `--host-policy`.

Source: docs/reference/configuration-and-scheduling.md, "Instance groups".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from host.options.flags import InvalidValue

_CORE_RANGES = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})?")
_MAX_CORE = 1 << 16  # the maximum number of a CPU or NUMA node


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """The CPUs that a process may run on (empty: all), and the NUMA node of its memory."""

    name: str
    cores: Sequence[int] = ()
    node: int | None = None


HostPolicies = Mapping[str, HostPolicy]
"""Policies by name."""


def read_policies(settings: Sequence[str]) -> HostPolicies:
    """Parses `<policy>,<setting>=<value>` texts; the last value of a setting counts.

    Raises InvalidValue.
    """
    policies: dict[str, HostPolicy] = {}
    for text in settings:
        name, comma, rest = text.partition(",")
        setting, _, value = rest.partition("=")
        if not (name and comma and setting and value):
            raise InvalidValue(
                f"--host-policy option format is '<policy name>,<setting>=<value>'. Got {text}"
            )
        policy = policies.get(name, HostPolicy(name))
        if setting == "cpu-cores":
            policies[name] = replace(policy, cores=_read_cores(value))
        elif setting == "numa-node":
            policies[name] = replace(policy, node=_read_node(value))
        else:
            raise InvalidValue(
                f"Unsupported host policy setting '{setting}' is specified, supported settings"
                " are 'numa-node', 'cpu-cores'"
            )
    return policies


def _read_cores(text: str) -> list[int]:
    cores: set[int] = set()
    for part in text.split(","):
        lower, _, upper = part.partition("-")
        fits = _CORE_RANGES.fullmatch(part) is not None
        if not fits or not int(lower) <= int(upper or lower) < _MAX_CORE:
            raise InvalidValue(
                "host policy setting 'cpu-cores' format is"
                f" '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got {part}"
            )
        cores.update(range(int(lower), int(upper or lower) + 1))
    return sorted(cores)


def _read_node(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) >= _MAX_CORE:
        raise InvalidValue(
            f"host policy setting 'numa-node' must be the number of a NUMA node. Got {text}"
        )
    return int(text)


def find_policy(policies: HostPolicies, kind: str, device: int, named: str) -> HostPolicy:
    """Returns the policy of an instance; `named` is the `host_policy` of its instance group.

    Without `named`, the kind of the instance selects the policy: `cpu`, `gpu_0`, ...
    """
    name = named or (f"gpu_{device}" if kind == "GPU" else kind.lower())
    return policies.get(name, HostPolicy(name))
