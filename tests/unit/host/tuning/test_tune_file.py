"""How `pbhost tune` limits its search, and how it writes the file."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from host.cli.tune import TuneOptions, limits_of, write_settings
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


def test_the_end_of_the_input_is_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    write_settings(tmp_path / "config.pbtxt", Settings(), Settings(4), TuneOptions())
    assert capsys.readouterr().out.endswith("not written\n")
    assert not (tmp_path / "config.pbtxt").exists()


def test_settings_that_the_file_does_not_have_leave_it_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text("max_batch_size: 8\n")
    write_settings(path, Settings(1, 8, True), Settings(1, 8), YES)
    assert "stays as it is" in capsys.readouterr().out
