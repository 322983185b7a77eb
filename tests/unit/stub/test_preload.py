"""What a model may not leave behind in the process that its instances are forked from."""

from __future__ import annotations

from pathlib import Path

from stub.preload import find_open_gpus


def test_open_gpus_are_found(tmp_path: Path) -> None:
    for number, target in enumerate(["/dev/null", "/dev/nvidiactl", "/dev/nvidia0", "pipe:[7]"]):
        (tmp_path / str(number)).symlink_to(target)
    (tmp_path / "gone").write_text("")
    assert find_open_gpus(str(tmp_path)) == ["/dev/nvidia0", "/dev/nvidiactl"]
