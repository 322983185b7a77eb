"""Headers of requests: those of restricted endpoints."""

from __future__ import annotations

import pytest

from host.errors import ErrorCode, HostError
from host.frontends.request_headers import UNRESTRICTED, Header, HeaderForwarding, Restrictions
from host.options.flags import InvalidValue


def lacking(restrictions: Restrictions, category: str, **sent: str | bytes) -> str | None:
    return restrictions.missing_header(category, sent.get)


def test_only_the_exact_value_passes() -> None:
    guard = Restrictions({"health": ("Key", "väl=ue"), "trace": ("other", "v")})
    assert lacking(guard, "health", key="väl=ue") is None
    assert lacking(guard, "health", key="väl=ue".encode()) is None
    for wrong in ("", "väl=u", "väl=uee", "VÄL=UE"):
        assert lacking(guard, "health", key=wrong) == "Key"
    assert lacking(guard, "health") == "Key"
    assert lacking(guard, "health", other="v") == "Key"


def test_unrestricted_categories_pass() -> None:
    guard = Restrictions({"health": ("key", "value")})
    assert "health" in guard
    assert "metadata" not in guard
    assert lacking(guard, "metadata") is None
    assert lacking(UNRESTRICTED, "health") is None


def test_the_prefix_is_part_of_the_header_name() -> None:
    guard = Restrictions({"health": ("Key", "value")}, "Triton-")
    assert guard.missing_header("health", {"triton-key": "value"}.get) is None
    assert guard.missing_header("health", {"key": "value"}.get) == "Triton-Key"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", []),
        (".*", ["X-Tenant", "x-b", "other"]),
        ("x-", ["X-Tenant", "x-b"]),
        ("^X-T", ["X-Tenant"]),
        ("(?-i)X-", ["X-Tenant"]),
        ("(?-i)x-", ["x-b"]),
        ("nant|the", ["X-Tenant", "other"]),
        ("nothing", []),
    ],
)
def test_a_pattern_ignores_case_by_default(pattern: str, names: list[str]) -> None:
    headers: list[Header] = [(b"X-Tenant", b"1"), ("x-b", "2"), ("other", b"3")]
    assert list(HeaderForwarding(pattern).to_parameters(headers)) == names
    assert bool(HeaderForwarding(pattern)) is (pattern != "")


def test_values_are_read_as_utf_8() -> None:
    headers = [(b"x", "é".encode()), (b"y", b"\xff")]
    assert HeaderForwarding(".").to_parameters(headers) == {
        "x": "é",
        "y": "\N{REPLACEMENT CHARACTER}",
    }


def test_reserved_names_are_case_sensitive() -> None:
    forwarding = HeaderForwarding(".")
    assert forwarding.to_parameters([("TIMEOUT", "1"), ("Triton_x", "2")]) == {
        "TIMEOUT": "1",
        "Triton_x": "2",
    }
    with pytest.raises(HostError) as caught:
        forwarding.to_parameters([("priority", "1")])
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == (
        "Header 'priority' is reserved for Triton usage and cannot be forwarded."
    )


def test_an_invalid_pattern_is_rejected() -> None:
    with pytest.raises(InvalidValue):
        HeaderForwarding("(?P<")
