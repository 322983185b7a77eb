"""The section "Every flag" of docs/reference/flags.md, generated from the options.

`python -m tests.flag_table` updates the page.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from host.options.command_line import DEPRECATED
from host.options.flags import Flag, Status
from host.options.server_flags import FLAGS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "flags.md"
BEGIN, END = "## Every flag\n", "\n## "
WIDTH = 128

TRITONS = frozenset(
    """
    id exit-timeout-secs
    log-verbose log-info log-warning log-error log-format log-file
    model-repository exit-on-error disable-auto-complete-config strict-readiness
    model-control-mode repository-poll-secs load-model model-config-name model-load-thread-count
    model-load-retry-count model-namespacing enable-peer-access
    allow-http http-address http-port reuse-http-port http-header-forward-pattern
    http-thread-count http-max-input-size http-restricted-api
    allow-grpc grpc-address grpc-port grpc-header-forward-pattern grpc-restricted-protocol
    grpc-infer-thread-count grpc-infer-allocation-pool-size grpc-max-response-pool-size
    reuse-grpc-port grpc-use-ssl grpc-server-cert grpc-server-key grpc-root-cert
    grpc-use-ssl-mutual grpc-infer-response-compression-level grpc-keepalive-time
    grpc-keepalive-timeout grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
    grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes
    grpc-max-connection-age grpc-max-connection-age-grace
    allow-metrics allow-cpu-metrics allow-gpu-metrics metrics-address metrics-port
    metrics-interval-ms metrics-config
    trace-config
    backend-directory backend-config
    repoagent-directory
    cache-config cache-directory
    rate-limit rate-limit-resource
    allow-client-shm
    pinned-memory-pool-byte-size buffer-manager-thread-count host-policy
    cuda-memory-pool-byte-size cuda-virtual-address-size min-supported-compute-capability
    model-load-gpu-limit
    allow-sagemaker sagemaker-port sagemaker-safe-port-range sagemaker-thread-count
    allow-vertex-ai vertex-ai-port vertex-ai-thread-count vertex-ai-default-model
    """.split()
)
"""Triton's flags except the deprecated ones (docs/reference/process.md, "Flags")."""


def section() -> str:
    """Returns the generated section, with its heading."""
    honoured = [flag for flag in FLAGS if flag.status is Status.HONOURED]
    lines = [
        BEGIN.strip(),
        "",
        "Names, forms and defaults are Triton's. `pbhost serve --help` explains each flag.",
        "",
        "### Flags with Triton's meaning",
        "",
        *_by_group(flag for flag in honoured if flag.name in TRITONS),
        "",
        "### Flags that Triton does not have",
        "",
        *_by_group(flag for flag in honoured if flag.name not in TRITONS),
        "",
        "### Flags that are accepted without effect",
        "",
        *_with_reasons(Status.IGNORED),
        "",
        "### Flags that stop the start unless they have the default value",
        "",
        *_with_reasons(Status.REFUSED),
        "",
    ]
    lines += ["### Deprecated flags", "", "| flag | replacement |", "|---|---|"]
    lines += [f"| `--{alias.name}` | {_plain(alias.help_text)} |" for alias in DEPRECATED]
    return "\n".join(lines) + "\n"


def _by_group(flags: Iterable[Flag]) -> list[str]:
    lines: list[str] = []
    for title, members in groupby(flags, key=lambda flag: flag.group):
        line = f"- {title}:"
        for flag in members:
            names = [flag.name, *filter(None, [flag.also])]
            for name in names:
                word = f" `--{name}`,"
                if len(line) + len(word) > WIDTH:
                    lines.append(line)
                    line = f" {word}"
                else:
                    line += word
        lines.append(line.removesuffix(","))
    return lines


def _with_reasons(status: Status) -> list[str]:
    flags: list[Flag] = [flag for flag in FLAGS if flag.status is status]
    return [
        "| flag | reason |",
        "|---|---|",
        *(
            f"| {', '.join(f'`--{flag.name}`' for flag in members)} | {reason} |"
            for reason, members in groupby(flags, key=lambda flag: flag.reason)
        ),
    ]


def _plain(text: str) -> str:
    return text.replace("<", "&lt;")


def written() -> str:
    """Returns the section as it is on the page."""
    text = PAGE.read_text()
    start = text.index(BEGIN)
    end = text.find(END, start + len(BEGIN))
    return text[start:] if end < 0 else text[start : end + 1]


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().replace(written(), section() + "\n").rstrip("\n") + "\n")
