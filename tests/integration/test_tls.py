"""TLS and mutual TLS on every endpoint: valid, invalid and missing certificates."""

from __future__ import annotations

import http.client as http_client
import signal
import socket
import ssl
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as grpcclient
import trustme
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve


@dataclass(frozen=True)
class Certificates:
    """Those of one authority, as PEM files in a folder."""

    folder: Path
    authority: trustme.CA

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        """A new authority, with a certificate for the server and one for a client."""
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "root.pem"))
        for name, identity in (("server", "127.0.0.1"), ("client", "client.example")):
            made = authority.issue_cert(identity)
            made.private_key_pem.write_to_path(str(folder / f"{name}.key"))
            for number, pem in enumerate(made.cert_chain_pems):
                pem.write_to_path(str(folder / f"{name}.pem"), append=number > 0)
        return cls(folder, authority)

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)

    def bytes(self, name: str) -> bytes:
        """The content of a file."""
        return (self.folder / name).read_bytes()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("strangers"))


@pytest.fixture
def empty(repository: RepositoryBuilder) -> RepositoryBuilder:
    """A repository without models, which is enough to shake hands."""
    return repository


def flags(
    certificates: Certificates,
    files: Mapping[str, str] | None = None,
    *,
    endpoint: str = "grpc",
    mutual: bool = False,
) -> list[str]:
    """Flags of an endpoint with TLS; `files` replace server_cert, server_key or root_cert."""
    named = {
        "server-cert": certificates["server.pem"],
        "server-key": certificates["server.key"],
        "root-cert": certificates["root.pem"],
        **{name.replace("_", "-"): path for name, path in (files or {}).items()},
    }
    return [
        f"--{endpoint}-use-ssl-mutual=true" if mutual else f"--{endpoint}-use-ssl=true",
        *(f"--{endpoint}-{name}={path}" for name, path in named.items()),
    ]


def send_request(
    host: RunningHost, trusted: Certificates, client: Certificates | None = None
) -> bool:
    """Whether the server says that it lives; raises RpcError if the hands are not shaken."""
    credentials = grpc.ssl_channel_credentials(
        trusted.bytes("root.pem"),
        client.bytes("client.key") if client else None,
        client.bytes("client.pem") if client else None,
    )
    with grpc.secure_channel(host.url, credentials) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return bool(stub.ServerLive(pb.ServerLiveRequest(), timeout=DEADLINE).live)


def refused(call: Any, *arguments: Any) -> str:
    """The details of an UNAVAILABLE answer."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(caught.value.details())


@pytest.fixture(scope="module")
def server(module_repository: RepositoryBuilder, module_serve: Serve, ours: Certificates) -> Any:
    return module_serve(
        module_repository, *flags(ours), *flags(ours, endpoint="http")
    ).wait_started()


@pytest.fixture(scope="module")
def mutual(module_repository: RepositoryBuilder, module_serve: Serve, ours: Certificates) -> Any:
    return module_serve(
        module_repository, *flags(ours, mutual=True), *flags(ours, endpoint="http", mutual=True)
    ).wait_started()


def test_a_client_that_trusts_the_authority_is_served(
    server: RunningHost, ours: Certificates
) -> None:
    assert send_request(server, ours)


def test_the_real_client_is_served(server: RunningHost, ours: Certificates) -> None:
    with grpcclient.InferenceServerClient(
        server.url, ssl=True, root_certificates=ours["root.pem"]
    ) as client:
        assert client.is_server_ready()


def test_a_client_does_not_talk_to_a_server_of_another_authority(
    server: RunningHost, strangers: Certificates
) -> None:
    assert "CERTIFICATE_VERIFY_FAILED" in refused(send_request, server, strangers)


def test_a_client_without_tls_is_not_served(server: RunningHost) -> None:
    with grpc.insecure_channel(server.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        refused(stub.ServerLive, pb.ServerLiveRequest())


def test_old_versions_of_tls_are_not_spoken(server: RunningHost) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        _handshake(server.port, old)


def _handshake(port: int, context: ssl.SSLContext) -> None:
    with socket.create_connection(("127.0.0.1", port), DEADLINE) as plain:
        context.wrap_socket(plain).close()


def test_mutual_tls_serves_clients_with_a_certificate(
    mutual: RunningHost, ours: Certificates
) -> None:
    assert send_request(mutual, ours, ours)


def test_mutual_tls_refuses_clients_without_a_certificate(
    mutual: RunningHost, ours: Certificates
) -> None:
    refused(send_request, mutual, ours)


def test_mutual_tls_refuses_clients_of_another_authority(
    mutual: RunningHost, ours: Certificates, strangers: Certificates
) -> None:
    refused(send_request, mutual, ours, strangers)


def test_without_mutual_tls_clients_need_no_certificate(
    server: RunningHost, ours: Certificates, strangers: Certificates
) -> None:
    assert send_request(server, ours, strangers)


# HTTP


def get(host: RunningHost, trusted: Certificates, client: Certificates | None = None) -> int:
    """The status of health over HTTPS; raises OSError if the hands are not shaken."""
    context = ssl.create_default_context(cafile=trusted["root.pem"])
    if client is not None:
        context.load_cert_chain(client["client.pem"], client["client.key"])
    connection = http_client.HTTPSConnection(host.http_url, timeout=DEADLINE, context=context)
    with closing(connection):
        connection.request("GET", "/v2/health/live")
        return connection.getresponse().status


def test_https_serves_clients_that_trust_the_authority(
    server: RunningHost, ours: Certificates, strangers: Certificates
) -> None:
    assert get(server, ours) == 200
    assert get(server, ours, strangers) == 200  # which need no certificate here
    with pytest.raises(ssl.SSLCertVerificationError):
        get(server, strangers)


def test_the_https_port_does_not_speak_plain_http(server: RunningHost) -> None:
    connection = http_client.HTTPConnection(server.http_url, timeout=DEADLINE)
    with closing(connection), pytest.raises((http_client.HTTPException, ConnectionError)):
        connection.request("GET", "/v2/health/live")
        connection.getresponse()


def test_mutual_https_serves_only_clients_with_a_certificate_of_the_authority(
    mutual: RunningHost, ours: Certificates, strangers: Certificates
) -> None:
    assert get(mutual, ours, ours) == 200
    for client in (None, strangers):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(mutual, ours, client)


def test_http_and_grpc_have_their_own_tls_settings(
    empty: RepositoryBuilder, serve: Serve, ours: Certificates
) -> None:
    host = serve(empty, *flags(ours, endpoint="http")).wait_started()
    assert get(host, ours) == 200
    with host.client() as client:
        assert client.is_server_live()


@pytest.mark.parametrize("name", ["server_cert", "server_key", "root_cert"])
def test_a_file_of_https_that_cannot_be_read_ends_the_start_before_models_load(
    repository: RepositoryBuilder, serve: Serve, ours: Certificates, name: str
) -> None:
    repository.copy("identity")
    output = ended(
        serve(repository, *flags(ours, {name: "/nowhere.pem"}, endpoint="http", mutual=True))
    )
    complaint = (
        f"Invalid argument - --http-{name.replace('_', '-')}: '/nowhere.pem' cannot be read:"
        " No such file or directory"
    )
    assert f"failed to start HTTP service: {complaint}" in output
    assert output.endswith("error: creating server: failed to start HTTP service")
    assert "READY" not in output


# Files that are of no use


def ended(host: RunningHost) -> str:
    """The output of a host that could not start."""
    assert host.process.wait(DEADLINE) == 1
    host.stop()
    return host.output


@pytest.mark.parametrize("engine", ["h2", "grpcio"])
@pytest.mark.parametrize("name", ["server_cert", "server_key"])
def test_a_file_that_cannot_be_read_counts_as_empty_and_then_nothing_can_start(
    repository: RepositoryBuilder, serve: Serve, ours: Certificates, name: str, engine: str
) -> None:
    repository.copy("identity")
    more = flags(ours, {name: "/nowhere.pem"})
    output = ended(serve(repository, f"--grpc-engine={engine}", *more))
    assert "loading: identity" not in output
    flag = f"--grpc-{name.replace('_', '-')}"
    complaint = f"{flag}: '/nowhere.pem' cannot be read: No such file or directory"
    assert f"{complaint}; treating it as empty" in output
    assert f"failed to start GRPC service: Invalid argument - {complaint}" in output
    assert output.endswith("error: creating server: failed to start GRPC service")


def test_a_flag_that_is_missing_is_named(
    empty: RepositoryBuilder, serve: Serve, ours: Certificates
) -> None:
    output = ended(serve(empty, "--grpc-use-ssl=true", f"--grpc-server-cert={ours['server.pem']}"))
    assert (
        "failed to start GRPC service: Invalid argument - --grpc-server-key: TLS needs a PEM file,"
        " but no path is given"
    ) in output


def test_a_key_that_is_not_the_certificates_is_named(
    empty: RepositoryBuilder, serve: Serve, ours: Certificates, strangers: Certificates
) -> None:
    output = ended(serve(empty, *flags(ours, {"server_key": strangers["server.key"]})))
    assert (
        f"Invalid argument - --grpc-server-cert: '{ours['server.pem']}' and --grpc-server-key"
        f" '{strangers['server.key']}' are not a matching certificate and key in PEM form"
        " without a password: KEY_VALUES_MISMATCH"
    ) in output


def test_mutual_tls_needs_a_root_certificate(
    empty: RepositoryBuilder, serve: Serve, ours: Certificates
) -> None:
    output = ended(serve(empty, *flags(ours, {"root_cert": ""}, mutual=True)))
    assert (
        "Invalid argument - --grpc-root-cert: TLS needs a PEM file, but no path is given"
    ) in output


def test_an_invalid_root_certificate_stops_the_start(
    empty: RepositoryBuilder, serve: Serve, ours: Certificates
) -> None:
    key = ours["server.key"]
    output = ended(serve(empty, *flags(ours, {"root_cert": key}, mutual=True)))
    assert (
        f"Invalid argument - --grpc-root-cert: '{key}' contains no certificates in PEM form: "
    ) in output


def test_an_unused_root_certificate_is_not_read(
    empty: RepositoryBuilder, serve: Serve, ours: Certificates
) -> None:
    host = serve(empty, *flags(ours, {"root_cert": "/nowhere.pem"})).wait_started()
    assert send_request(host, ours)
    assert "/nowhere.pem" not in host.output


# Files that change


def rotate(folder: Path, *names: str) -> Certificates:
    """Replaces files of a folder by those of a new authority, which is returned."""
    fresh = folder / "fresh"
    fresh.mkdir()
    new = Certificates.make(fresh)
    for name in names:
        (fresh / name).replace(folder / name)
    return new


@pytest.mark.parametrize("engine", ["h2", "grpcio"])
def test_sighup_reads_certificates_again(
    engine: str, empty: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    old = Certificates.make(tmp_path)
    host = serve(
        empty, *flags(old), *flags(old, endpoint="http"), f"--grpc-engine={engine}"
    ).wait_started()
    assert send_request(host, old)
    new = rotate(tmp_path, "server.pem", "server.key")
    host.process.send_signal(signal.SIGHUP)
    host.wait_for("Read the TLS files of grpc again")
    host.wait_for("Read the TLS files of http again")
    assert send_request(host, new)
    assert get(host, new) == 200
    refused(send_request, host, old)


def test_new_certificates_are_noticed(
    empty: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    old = Certificates.make(tmp_path)
    host = serve(empty, *flags(old)).wait_started()
    new = rotate(tmp_path, "server.pem", "server.key")
    host.wait_for("Read the TLS files of grpc again")
    assert send_request(host, new)


def test_a_certificate_that_cannot_be_used_leaves_the_old_one(
    empty: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    old = Certificates.make(tmp_path)
    host = serve(empty, *flags(old)).wait_started()
    (tmp_path / "server.pem").write_text("half a certif")
    host.process.send_signal(signal.SIGHUP)
    host.wait_for("--grpc-server-cert: .*; the files that were read before stay in use")
    assert send_request(host, old)
