"""The goals and limits of `pbhost tune`, and how it writes the file."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from host.cli.tune import TuneOptions, limits_of, read_goal, write_settings
from host.options.flags import InvalidValue
from host.tuning.settings import Settings
from pb_utils._text_form import InvalidInput

YES = TuneOptions(yes=True)


def test_limits_below_the_present_settings_are_refused() -> None:
    start = Settings(100, 8, True)
    with pytest.raises(InvalidInput, match="--max-instances: expected at least 100"):
        limits_of(start, TuneOptions(max_instances=99))
    with pytest.raises(InvalidInput, match="--max-batch: expected at least 8"):
        limits_of(start, TuneOptions(max_batch=7))
    assert limits_of(start, TuneOptions()).instances >= 100


def test_a_file_keeps_its_line_ends_its_mode_and_its_link(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "config.pbtxt"
    file.write_bytes(b"# mine\r\ninstance_group {\r\n  count: 1\r\n}\r\n")
    file.chmod(0o640)
    link.symlink_to(file)
    write_settings(link, Settings(), Settings(4, 8, True), YES)
    assert file.read_bytes() == (
        b"# mine\r\ninstance_group {\r\n  count: 4\r\n}\r\n"
        b"max_batch_size: 8\r\ndynamic_batching { }\r\n"
    )
    assert file.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, file]


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ("y\n", "written to {path}\n"),
        (" YES \n", "written to {path}\n"),
        ("n\n", "? [y/N] not written\n"),
        ("\n", "? [y/N] not written\n"),
        ("maybe\n", "? [y/N] not written\n"),
        ("", "? [y/N] \nnot written\n"),  # the end of the input
        (None, "\nnot written: --yes writes it without a question\n"),  # no terminal
    ],
)
def test_a_file_is_written_after_a_yes(
    answer: str | None,
    end: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.pbtxt"
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: answer is not None)
    monkeypatch.setattr("sys.stdin", terminal)
    write_settings(path, Settings(), Settings(4), TuneOptions())
    out = capsys.readouterr().out
    assert out.startswith(f"--- {path}\n+++ {path}\n")
    assert "+instance_group { count: 4 }\n" in out
    assert out.endswith(end.format(path=path))
    assert path.exists() == ("written to" in end)


def test_goals_are_read() -> None:
    goals = {
        "throughput": (0, 0), "p99=20ms": (0.99, 0.02), "p99.9=1.5s": (0.999, 1.5),
        "p50=300us": (0.5, 3e-4),
    }  # fmt: skip
    for text, expected in goals.items():
        goal = read_goal(text)
        assert (goal.quantile, goal.seconds) == pytest.approx(expected)
    for text in ("p99", "p99=20", "p0=1ms", "p99=0ms", "p100=1s", "latency", "p99=-1ms"):
        with pytest.raises(InvalidValue, match="expected throughput, or a latency as p99=20ms"):
            read_goal(text)


def test_settings_that_the_file_does_not_have_leave_it_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text("max_batch_size: 8\n")
    write_settings(path, Settings(1, 8, True), Settings(1, 8), YES)
    assert "stays as it is" in capsys.readouterr().out
