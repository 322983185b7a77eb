"""The settings of `--metrics-config`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_BOOLS = ("true", "false")
_SWITCHES = {
    "counter_latencies": "true",
    "summary_latencies": "false",
    "histogram_latencies": "false",
}

_NUMBER = re.compile(
    r"\s*([+-]?(?:0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP][+-]?[0-9]+)?"
    r"|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?))",
    re.ASCII,
)

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Which latency metrics are shown, and the quantiles of summaries
    (docs/reference/protocol.md, "Metrics").

    `warnings` are log lines about settings that have no effect.
    """

    counter_latencies: bool = True
    summary_latencies: bool = False
    histogram_latencies: bool = False
    quantiles: tuple[float, ...] = DEFAULT_QUANTILES
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> MetricsSettings:
        """Parses texts `<setting>=<value>`. The last value of a repeated setting is used."""
        given = dict(text.split("=", 1) for text in texts)
        quantiles, warnings = _quantiles(given.pop("summary_quantiles", ""))
        made: dict[str, bool] = {}
        for name, default in _SWITCHES.items():
            text = given.pop(name, default)
            made[name] = (text if text in _BOOLS else default) == "true"
            if text not in _BOOLS:
                warnings.append(
                    f"--metrics-config: {name} must be true or false, got '{text}'; using {default}"
                )
        warnings += [
            f"--metrics-config: setting '{name}' is not used by this version" for name in given
        ]
        return cls(**made, quantiles=quantiles or DEFAULT_QUANTILES, warnings=tuple(warnings))


def _quantiles(text: str) -> tuple[tuple[float, ...], list[str]]:
    """Parses `<quantile>:<error>,...`; returns the valid quantiles, and warnings for the others.

    The error is the tolerance of Triton's estimate. It is not used here. As in Triton, text after a
    number is ignored.
    """
    quantiles: list[float] = []
    warnings: list[str] = []
    for part in filter(None, text.split(",")):
        try:
            quantile, error = map(_read_number, part.split(":", 1))
        except ValueError:
            quantile = error = -1.0
        if 0.0 <= quantile <= 1.0 and 0.0 <= error <= 1.0:
            quantiles.append(quantile)
        else:
            warnings.append(
                f"--metrics-config: ignoring '{part}' in summary_quantiles; expected"
                " <quantile>:<error>, both from 0 to 1"
            )
    return tuple(dict.fromkeys(quantiles)), warnings


def _read_number(text: str) -> float:
    """Reads the longest prefix that is a finite number, like `strtod` of C. Raises ValueError."""
    found = _NUMBER.match(text)
    if found is None:
        raise ValueError(text)
    return float.fromhex(found[1]) if "x" in found[1].lower() else float(found[1])
