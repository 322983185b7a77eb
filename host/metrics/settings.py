"""What `--metrics-config` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_BOOLS = ("true", "false")
_SWITCHES = {
    "counter_latencies": "true",
    "summary_latencies": "false",
    "histogram_latencies": "false",
}

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Which latencies are shown, and the quantiles of summaries (protocol spec 6).

    `warnings` says what was given and has no effect.
    """

    counter_latencies: bool = True
    summary_latencies: bool = False
    histogram_latencies: bool = False
    quantiles: tuple[float, ...] = DEFAULT_QUANTILES
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> MetricsSettings:
        """From `<setting>=<value>` each; the last one of a name counts."""
        given = dict(text.split("=", 1) for text in texts)
        quantiles, warnings = _quantiles(given.pop("summary_quantiles", ""))
        made: dict[str, bool] = {}
        for name, default in _SWITCHES.items():
            text = given.pop(name, default)
            made[name] = (text if text in _BOOLS else default) == "true"
            if text not in _BOOLS:
                warnings.append(
                    f"--metrics-config: {name} is true or false, not '{text}'; it is {default}"
                )
        warnings += [
            f"--metrics-config: setting '{name}' is not used by this version" for name in given
        ]
        return cls(**made, quantiles=quantiles or DEFAULT_QUANTILES, warnings=tuple(warnings))


def _quantiles(text: str) -> tuple[tuple[float, ...], list[str]]:
    """The quantiles of `<quantile>:<allowed error>,...`, and complaints about those left out.

    The error is only what Triton would allow itself; summaries here need not ask for it.
    """
    quantiles: list[float] = []
    warnings: list[str] = []
    for part in filter(None, text.split(",")):
        try:
            quantile, error = map(float, part.split(":"))
        except ValueError:
            quantile = error = -1.0
        if 0.0 <= quantile <= 1.0 and 0.0 <= error <= 1.0:
            quantiles.append(quantile)
        else:
            warnings.append(
                f"--metrics-config: summary_quantiles has no use for '{part}'; expected"
                " <quantile>:<error>, both from 0 to 1"
            )
    return tuple(dict.fromkeys(quantiles)), warnings
