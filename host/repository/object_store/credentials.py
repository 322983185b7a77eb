"""Credentials for object stores: from Triton's file of them, or as the SDKs find them."""

from __future__ import annotations

import configparser
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from host.errors import invalid_argument
from host.repository.object_store.location import GCS, S3, StoreLocation

CREDENTIAL_FILE = "TRITON_CLOUD_CREDENTIAL_PATH"

Settings = dict[str, Any]
"""Settings of a store, by the names that the library has for them."""

_S3_SOURCES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_OTHER_PROFILES = (
    "sso_session",
    "sso_start_url",
    "role_arn",
    "source_profile",
    "credential_process",
)
"""Keys of profiles whose credentials the library does not get."""

_TRUE = ("1", "true", "yes")


def read_settings(location: StoreLocation, environment: Mapping[str, str]) -> Settings:
    """The endpoint and the credentials of a store. Blocks. Raises HostError INVALID_ARG.

    The library reads the variables of the SDKs itself; what is returned comes before them.
    """
    given = _read_credentials(location, environment)
    if location.kind == S3:
        return _s3_settings(location, given, environment)
    if location.kind == GCS:
        return _gcs_settings(given, environment)
    return _azure_settings(location, given, environment)


def _read_credentials(location: StoreLocation, environment: Mapping[str, str]) -> Any:
    """The entry of Triton's file whose prefix is the longest; None without one."""
    path = environment.get(CREDENTIAL_FILE)
    if not path:
        return None
    try:
        document = json.loads(Path(path).read_text())
        entries = document.get(location.kind, {})
        found = [prefix for prefix in entries if location.url.startswith(prefix)]
        return entries[max(found, key=len)] if found else None
    except OSError as error:
        raise invalid_argument(
            f"failed to read the file of {CREDENTIAL_FILE}, {path}: {error.strerror}"
        ) from None
    except (ValueError, AttributeError, TypeError) as error:
        raise invalid_argument(
            f"the file of {CREDENTIAL_FILE}, {path}, is not a JSON object with the keys 'gs', 's3'"
            f" and 'as' and a URL prefix for each credential: {error}"
        ) from None


def _entry(given: Any, location: StoreLocation) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise invalid_argument(
            f"the credential of '{location.url}' in the file of {CREDENTIAL_FILE} must be an"
            f" object, got {type(given).__name__}"
        )
    return {key: str(value) for key, value in given.items() if value}


def _s3_settings(location: StoreLocation, given: Any, environment: Mapping[str, str]) -> Settings:
    entry = _entry(given, location)
    has_source = _has_s3_source(environment)
    anonymous = environment.get("AWS_SKIP_SIGNATURE", "").lower() in _TRUE
    no_metadata = environment.get("AWS_EC2_METADATA_DISABLED", "").lower() in _TRUE
    anonymous = anonymous or (no_metadata and not has_source)
    name = entry.get("profile") or environment.get("AWS_PROFILE")
    by_profile = not entry.get("key_id") and ("profile" in entry or not has_source)
    profile = _read_profile(name, environment, by_profile and (bool(name) or not anonymous))
    keys = {
        "access_key_id": entry.get("key_id", ""),
        "secret_access_key": entry.get("secret_key", ""),
        "session_token": entry.get("session_token", ""),
        "region": entry.get("region", ""),
    }
    if by_profile:
        keys.update((name, value) for name, value in profile.items() if not keys.get(name))
    if not keys["region"] and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & environment.keys():
        keys["region"] = profile.get("region", "us-east-1")
    settings: Settings = {name: value for name, value in keys.items() if value}
    if location.endpoint:
        settings["aws_endpoint_url_s3"] = location.endpoint  # "endpoint" gives way to a variable
    if "access_key_id" not in settings and anonymous:
        settings["skip_signature"] = True
    return settings


def _has_s3_source(environment: Mapping[str, str]) -> bool:
    return any(environment.get(name) for name in _S3_SOURCES)


def _read_profile(
    name: str | None, environment: Mapping[str, str], required: bool
) -> dict[str, str]:
    """The keys and the region of a profile in the files of the AWS tools.

    Raises HostError, also if `required` and the profile has credentials of another kind than keys:
    the library would pass over them.
    """
    home = Path(environment.get("HOME") or os.path.expanduser("~"))
    secrets = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws/credentials")
    settings = Path(environment.get("AWS_CONFIG_FILE") or home / ".aws/config")
    profile = name or "default"
    found: dict[str, str] = {}
    for path, section in ((settings, f"profile {profile}"), (secrets, profile)):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path)
        except (OSError, configparser.Error, UnicodeDecodeError) as error:
            raise invalid_argument(f"failed to read {path}: {_describe(error)}") from None
        for one in (section, profile):
            if parser.has_section(one):
                found.update(parser.items(one))
                break
    if name and not found:
        raise invalid_argument(f"profile '{name}' is neither in {secrets} nor in {settings}")
    kind = next(filter(found.get, _OTHER_PROFILES), None)
    if required and kind is not None and not found.get("aws_access_key_id"):
        raise invalid_argument(
            f"profile '{profile}' in {settings} has credentials by '{kind}', expected"
            " aws_access_key_id and aws_secret_access_key: get temporary ones with"
            f" 'aws configure export-credentials --profile {profile} --format env'"
        )
    names = {
        "access_key_id": "aws_access_key_id",
        "secret_access_key": "aws_secret_access_key",
        "session_token": "aws_session_token",
        "region": "region",
    }
    return {ours: found[theirs] for ours, theirs in names.items() if found.get(theirs)}


def _describe(error: Exception) -> str:
    """What is wrong with a file of secrets, without its lines."""
    line = getattr(error, "lineno", None)
    if isinstance(error, configparser.ParsingError) and line is None:
        line = error.errors[0][0]
    return type(error).__name__ + ("" if line is None else f" in line {line}")


def _gcs_settings(given: Any, environment: Mapping[str, str]) -> Settings:
    settings: Settings = {}
    path = given or environment.get("GOOGLE_APPLICATION_CREDENTIALS")
    if path:
        settings["application_credentials"] = str(path)
    emulator = environment.get("STORAGE_EMULATOR_HOST")
    if emulator:
        settings["base_url"] = emulator if "://" in emulator else f"http://{emulator}"
    anonymous = environment.get("GOOGLE_SKIP_SIGNATURE", "").lower() in _TRUE
    if anonymous or (emulator and not path):
        settings["skip_signature"] = True
    return settings


def _azure_settings(
    location: StoreLocation, given: Any, environment: Mapping[str, str]
) -> Settings:
    entry = _entry(given, location)
    settings: Settings = {"account_name": entry.get("account_str", location.account)}
    if entry.get("account_key"):
        settings["account_key"] = entry["account_key"]
    elif environment.get("AZURE_STORAGE_KEY"):
        settings["account_key"] = environment["AZURE_STORAGE_KEY"]
    endpoint = location.endpoint or environment.get("AZURE_STORAGE_ENDPOINT")
    if endpoint:
        settings["endpoint"] = endpoint
    if environment.get("AZURE_SKIP_SIGNATURE", "").lower() in _TRUE:
        settings["skip_signature"] = True
    return settings
