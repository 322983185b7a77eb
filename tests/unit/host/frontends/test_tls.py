"""Certificates in files: how they are read, and every error about them."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Mapping
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from host.errors import ErrorCode, HostError
from host.frontends.tls import TlsFiles


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


@pytest.mark.parametrize("lost", ["server-cert", "root-cert"])
def test_a_file_that_a_rotation_removes_after_it_was_read_is_named(
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
    text = complaint(made)
    assert text.startswith(f"--http-{lost}: ")
    assert "No such file or directory" in text


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
