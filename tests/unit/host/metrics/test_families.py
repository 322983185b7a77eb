"""The metric families of the server: their catalogue, and their samples."""

from __future__ import annotations

import pytest

from host.metrics.families import CATALOGUE, MetricsSnapshot
from tests.conftest import ROOT


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_family_is_documented_with_its_kind(name: str) -> None:
    page = (ROOT / "docs" / "how-to" / "metrics.md").read_text()
    rows = (line.split(" | ") for line in page.splitlines() if line.startswith(("| `nv_", "| `p")))
    (row,) = (row for row in rows if f"`{name}`" in row[0])
    kind, _ = CATALOGUE[name]
    assert row[1] == kind.value


def test_a_snapshot_has_only_added_families_in_the_order_of_the_catalogue() -> None:
    snapshot = MetricsSnapshot()
    assert snapshot.families() == []
    snapshot["nv_cpu_utilization"].add((), 1)
    snapshot["nv_inference_count"].add((), 2)
    snapshot["nv_cpu_utilization"].add((("k", "v"),), 3)
    assert [family.name for family in snapshot.families()] == [
        "nv_inference_count",
        "nv_cpu_utilization",
    ]
    with pytest.raises(KeyError):
        snapshot["missing"]
