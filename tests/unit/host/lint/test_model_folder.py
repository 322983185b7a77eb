"""Which files of a model in an object store the check reads."""

from __future__ import annotations

from pathlib import Path

from host.lint.model_folder import LintSettings, choose_files
from host.models.backends import Backends
from host.repository.model_directory import ModelDirectory

LARGE = 1 << 30
CONFIG = """
default_model_filename: "model.onnx"
model_repository_agents { agents { name: "checksum" parameters {
  key: "MD5:2/checked.bin" value: "0" } } }
"""


def test_weights_are_read_only_where_the_configuration_names_them(tmp_path: Path) -> None:
    for version in "123":
        (tmp_path / version).mkdir()
    settings = LintSettings(Backends(tmp_path))
    directory = ModelDirectory("m", tmp_path)

    def read(config: str) -> set[str]:
        (tmp_path / "config.pbtxt").write_text(config)
        reads = choose_files(directory, settings)
        files = ["a.json", "1/x.py", "2/model.onnx", "2/checked.bin", "3/x.py", "3/weights"]
        return {file for file in files if reads(file, LARGE)} | (
            {"small"} if reads("3/weights", 100) else set()
        )

    assert read(CONFIG) == {"a.json", "3/x.py", "small"}
    specific = "version_policy { specific { versions: [2] } }"
    assert read(CONFIG + specific) == {"a.json", "2/checked.bin"}
    assert read("not a configuration") == {"a.json", "1/x.py", "3/x.py", "small"}
