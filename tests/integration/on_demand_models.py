"""Models that load when a test lets them, and the metrics about their loads."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.request import urlopen

from tests.conftest import DEADLINE, RunningHost
from tests.integration.control_models import MODEL

ON_DEMAND = "--model-control-mode=on-demand"


def gated(name: str, gate: Path, then: str = "pass") -> str:
    """A model whose `initialize` prints a line, waits until the file exists, and runs `then`."""
    body = f"""
        self.args = args
        print('begins to load {name}', flush=True)
        until(lambda: os.path.exists({str(gate)!r}), 'the gate')
        {then}
"""
    return MODEL.replace("NAME", name).replace("\n        self.args = args\n", body)


def parameter(key: str, value: object) -> str:
    """A parameter of a configuration."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def metric(host: RunningHost, name: str, **labels: str) -> float:
    """The sum of the samples of a metric that have these labels."""
    with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as answer:
        text = answer.read().decode()
    samples = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return sum(
        float(value)
        for found, value in samples
        if all(f'{key}="{wanted}"' in found for key, wanted in labels.items())
    )


def waiting(host: RunningHost) -> float:
    """The number of requests that wait for a load now."""
    return metric(host, "pbhost_on_demand_waiting_requests")
