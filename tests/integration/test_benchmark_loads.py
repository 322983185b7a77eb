"""The loads of the benchmarks get valid responses, and detect failures."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.__main__ import REPOSITORY
from benchmarks.bls import BLS_LOADS, measure_bls
from benchmarks.differing import DIFFERING_LOADS, measure_differing
from benchmarks.encoders import EncodedRequest, Model, v2_grpc, v2_json
from benchmarks.load import Load, measure
from benchmarks.memory import Sample
from benchmarks.mixture import MIXTURE
from benchmarks.peer import Peer
from benchmarks.servers import RunningServer
from tests.conftest import Serve

IDENTITY = Model("identity_fp32", "INPUT0", "OUTPUT0", (16,))


@pytest.fixture(scope="module")
def server(module_serve: Serve) -> RunningServer:
    host = module_serve(REPOSITORY, "--allow-client-shm=true").wait_started()
    return RunningServer(host.process.pid, host.port, int(host.http_url.rpartition(":")[2]), 0.0)


@pytest.mark.parametrize("name", MIXTURE)
def test_every_load_of_the_mixture_can_be_repeated(server: RunningServer, name: str) -> None:
    steps = MIXTURE[name](server)
    for _ in range(3):
        next(steps)
    steps.close()


def test_a_sample_separates_the_host_from_its_stubs(server: RunningServer) -> None:
    sample = Sample.of(server, 1.0)
    assert 5 < sample.host_pss < sample.host_rss
    assert 5 < sample.stubs_pss < sample.stubs_rss
    assert sample.host_descriptors > 10
    assert sample.stubs_descriptors > 10


@pytest.mark.parametrize("name", BLS_LOADS)
def test_every_bls_load_is_measured(server: RunningServer, name: str) -> None:
    load = BLS_LOADS[name]
    found = measure_bls(server, replace(load, calls=1, streamed=min(load.streamed, 5)))
    assert found.rate > 0


@pytest.mark.parametrize(
    "name",
    [
        "all of these, parameters, header fields of a proxy",
        "all of these, over HTTP as JSON",
    ],
)
def test_requests_that_differ_are_answered(server: RunningServer, name: str) -> None:
    found = measure_differing(server, name, 2 * DIFFERING_LOADS[name].threads, 0)
    assert found.rate > 0


@pytest.mark.parametrize("protocol", [v2_json, v2_grpc])
def test_a_request_gets_the_same_response_in_both_protocols(
    server: RunningServer, protocol: Callable[[RunningServer, Model], EncodedRequest]
) -> None:
    np.testing.assert_array_equal(protocol(server, IDENTITY).answer(), IDENTITY.array())


@pytest.mark.skipif(shutil.which("h2load") is None, reason="h2load is not installed")
class TestH2load:
    @pytest.mark.parametrize("protocol", [v2_json, v2_grpc])
    def test_it_measures_a_load(
        self, server: RunningServer, protocol: Callable[[RunningServer, Model], EncodedRequest]
    ) -> None:
        found = protocol(server, IDENTITY).measure(2, 1)
        assert found.rate > 0
        assert 0 < found.p50 <= found.p99

    def test_an_error_status_stops_the_benchmark(self, server: RunningServer) -> None:
        missing = Model("missing", "INPUT0", "OUTPUT0", (16,))
        with pytest.raises(SystemExit, match="h2load failed at http://127"):
            v2_json(server, missing).measure(1, 0.1)

    def test_failed_grpc_calls_with_http_status_200_stop_the_benchmark(
        self, server: RunningServer
    ) -> None:
        wrong = Load("identity_batched", 16, 1, by_h2load=True)  # a dimension is missing
        with pytest.raises(SystemExit, match="has answered 0 requests only"):
            measure(Peer(REPOSITORY), wrong, server, 0.1)
