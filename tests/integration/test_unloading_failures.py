"""Models that could not be loaded, and are no longer wanted."""

from __future__ import annotations

import pytest

from tests.conftest import RepositoryBuilder, Serve

ENSEMBLE = """
platform: "ensemble"
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
ensemble_scheduling { step [ {
  model_name: "absent" model_version: -1
  input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }
} ] }
"""


@pytest.mark.parametrize("namespaces", ["false", "true"])
def test_a_model_that_has_failed_does_not_count_once_it_is_unloaded(
    repository: RepositoryBuilder, serve: Serve, namespaces: str
) -> None:
    repository.add("broken", config=ENSEMBLE)
    host = serve(
        repository,
        "--model-control-mode=explicit",
        "--load-model=broken",
        "--exit-on-error=false",
        f"--model-namespacing={namespaces}",
    ).wait_started()
    with host.client() as client:
        assert not client.is_server_ready()
        client.unload_model("broken")
        assert client.is_server_ready()
