"""Certificates in files: how they are read, and every error about them."""

from __future__ import annotations

import os
import resource
import shutil
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from host.errors import ErrorCode, HostError
from host.frontends.tls import ServerTls, TlsFiles


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root.pem, and server.pem with server.key, which secret.key is with a password."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "root.pem"))
    made = authority.issue_cert("localhost")
    made.private_key_pem.write_to_path(str(folder / "server.key"))
    made.cert_chain_pems[0].write_to_path(str(folder / "server.pem"))
    key = serialization.load_pem_private_key(made.private_key_pem.bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (folder / "secret.key").write_bytes(encrypted)
    return folder


def files(folder: Path, other: Mapping[str, str] | None = None, *, mutual: bool = True) -> TlsFiles:
    paths = {
        "server_cert": str(folder / "server.pem"),
        "server_key": str(folder / "server.key"),
        "root_cert": str(folder / "root.pem"),
        **(other or {}),
    }
    return TlsFiles("http", mutual=mutual, **paths)


def complaint(made: TlsFiles) -> str:
    with pytest.raises(HostError) as caught:
        made.create_context()
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


@pytest.mark.parametrize("mutual", [True, False])
def test_only_mutual_tls_requires_client_certificates(folder: Path, mutual: bool) -> None:
    context = files(folder, mutual=mutual).create_context()
    assert context.verify_mode is (ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert len(context.get_ca_certs()) == mutual


@pytest.mark.parametrize("name", ["server_cert", "server_key", "root_cert"])
def test_a_file_that_cannot_be_read_or_is_not_given_is_named(folder: Path, name: str) -> None:
    flag = f"--http-{name.replace('_', '-')}"
    assert complaint(files(folder, {name: "/nowhere"})) == (
        f"{flag}: '/nowhere' cannot be read: No such file or directory"
    )
    assert complaint(files(folder, {name: str(folder)})) == (
        f"{flag}: '{folder}' cannot be read: Is a directory"
    )
    assert complaint(files(folder, {name: ""})) == (
        f"{flag}: TLS needs a PEM file, but no path is given"
    )


@pytest.mark.parametrize("lost", ["server-cert", "server-key", "root-cert"])
def test_a_file_that_a_rotation_removes_after_it_was_read_is_not_missed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    made = files(tmp_path)
    read_file = TlsFiles.read_file

    def read_and_remove(self: TlsFiles, name: str) -> bytes:
        content = read_file(self, name)
        if name == lost:
            Path(getattr(self, name.replace("-", "_"))).unlink()
        return content

    monkeypatch.setattr(TlsFiles, "read_file", read_and_remove)
    context = made.create_context()
    assert shake_hands(context, folder) == certificate_of(folder)
    assert complaint(made) == (
        f"--http-{lost}: '{getattr(made, lost.replace('-', '_'))}' cannot be read:"
        " No such file or directory"
    )


def renew(folder: Path) -> None:
    """Replaces the certificate and the key of the server, by another authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "root.pem"))
    made = authority.issue_cert("localhost")
    made.private_key_pem.write_to_path(str(folder / "server.key"))
    made.cert_chain_pems[0].write_to_path(str(folder / "server.pem"))


def certificate_of(folder: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert((folder / "server.pem").read_text())


def shake_hands(context: ssl.SSLContext, client: Path, *protocols: str) -> bytes | None:
    """The certificate that a client gets, which uses the files in a folder itself.

    `protocols`: those of ALPN; the first must be agreed on.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if protocols:
        trusting.set_alpn_protocols(protocols)
    trusting.load_verify_locations(client / "root.pem")
    trusting.load_cert_chain(client / "server.pem", client / "server.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        trusting.wrap_bio(to_client, to_server, server_hostname="localhost"),
        context.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):  # more flights than a handshake has
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    assert ends[0].selected_alpn_protocol() == (protocols[0] if protocols else None)
    return ends[0].getpeercert(binary_form=True)


@pytest.mark.parametrize("lost", ["server.pem", "server.key", "root.pem"])
def test_files_that_cannot_be_used_leave_the_old_ones(
    folder: Path, tmp_path: Path, lost: str
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tls = ServerTls(files(tmp_path))
    renew(tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(HostError, match="cannot be read: No such file or directory"):
        tls.reload()
    assert shake_hands(tls.context, folder) == certificate_of(folder)


@pytest.mark.parametrize("lost", ["server.pem", "server.key", "root.pem"])
def test_a_rotation_between_check_and_use_leaves_a_certificate_with_its_key(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tls = ServerTls(files(tmp_path))
    renew(tmp_path)
    renewed = tmp_path / "renewed"
    shutil.copytree(tmp_path, renewed)
    load_cert_chain = ssl.SSLContext.load_cert_chain

    def remove_and_load(self: ssl.SSLContext, *arguments: Any, **named: Any) -> None:
        (tmp_path / lost).unlink(missing_ok=True)
        load_cert_chain(self, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(ssl.SSLContext, "load_cert_chain", remove_and_load)
        tls.reload()
    assert shake_hands(tls.context, renewed) == certificate_of(renewed)


def test_an_authority_that_is_removed_is_not_trusted_any_more(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tls = ServerTls(files(tmp_path))
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "root.pem"))
    assert shake_hands(tls.context, folder) == certificate_of(folder)
    tls.reload()
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tls.context, folder)


def test_protocols_are_agreed_on_also_after_a_reload(folder: Path) -> None:
    tls = ServerTls(files(folder), ["h2"])
    assert shake_hands(tls.context, folder, "h2") == certificate_of(folder)
    tls.reload()
    assert shake_hands(tls.context, folder, "h2") == certificate_of(folder)


def test_handshakes_succeed_while_files_are_read_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tls = ServerTls(files(tmp_path))
    renew(tmp_path)
    load_verify_locations = ssl.SSLContext.load_verify_locations
    seen = []

    def shake_hands_and_load(self: ssl.SSLContext, path: str) -> None:
        monkeypatch.undo()
        seen.append(shake_hands(tls.context, folder))  # the new certificate and key are read
        load_verify_locations(self, path)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", shake_hands_and_load)
    tls.reload()
    assert seen == [certificate_of(folder)]


def test_the_root_certificate_is_read_only_for_mutual_tls(folder: Path) -> None:
    files(folder, {"root_cert": "/nowhere"}, mutual=False).create_context()


@pytest.mark.parametrize("key", ["root.pem", "secret.key"])
def test_an_invalid_or_encrypted_key_is_rejected_without_a_prompt(folder: Path, key: str) -> None:
    text = complaint(files(folder, {"server_key": str(folder / key)}))
    assert text.startswith(
        f"--http-server-cert: '{folder}/server.pem' and --http-server-key '{folder}/{key}' are not"
        " a matching certificate and key in PEM form without a password: "
    )


def test_a_root_certificate_without_certificates_is_refused(folder: Path) -> None:
    key = str(folder / "server.key")
    assert complaint(files(folder, {"root_cert": key})).startswith(
        f"--http-root-cert: '{key}' contains no certificates in PEM form: "
    )


@pytest.mark.parametrize("free", range(3))
def test_too_many_open_files_are_not_taken_for_a_wrong_certificate(folder: Path, free: int) -> None:
    made = files(folder)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = os.open(folder / "root.pem", os.O_RDONLY)
    os.close(opened)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + free, limits[1]))
    try:
        text = complaint(made)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert text.startswith("--http-server-cert: ")
    assert text.endswith(" cannot be read: Too many open files")
