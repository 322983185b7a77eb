"""gRPC clients that balance their requests over several servers, as behind a headless Service."""

from __future__ import annotations

import numpy as np
import tritonclient.grpc as grpcclient

from tests.clients import tensor
from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until


def count_requests(host: RunningHost) -> int:
    with host.client() as client:
        (stats,) = client.get_inference_statistics("identity").model_stats
        return int(stats.inference_stats.success.count)


def test_a_client_with_round_robin_uses_all_servers(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    """It continues with one of them when the other one is stopped."""
    repository.copy("identity")
    flags = ["--grpc-max-connection-age=300000"]
    hosts = [serve(repository, *flags) for _ in range(2)]
    addresses = ",".join(host.wait_started().url for host in hosts)
    given = tensor("INPUT0", np.ones(4, np.float32))
    policy = [("grpc.lb_policy_name", "round_robin")]
    with grpcclient.InferenceServerClient(f"ipv4:{addresses}", channel_args=policy) as client:
        wait_until(client.is_server_ready, "a server")

        def both_used() -> bool:
            client.infer("identity", [given])
            return all(map(count_requests, hosts))

        wait_until(both_used, "requests at both servers")
        assert hosts[0].stop() == 0
        before = count_requests(hosts[1])
        for _ in range(4):
            client.infer("identity", [given])
        assert count_requests(hosts[1]) == before + 4
