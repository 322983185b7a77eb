"""Loads of sound and broken models, at the start of a host and by request."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.clients import infer_error, run_command, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, Serve, wait_until

BODY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""

BROKEN = {
    "syntax": ("def broken(:\n    pass\n", r"SyntaxError: .*\n\nAt:\n.*model\.py\(1\)"),
    "imports": ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_lib"),
    "no_class": ("x = 1\n", "AttributeError: .*TritonPythonModel"),
    "raises": (
        BODY + "\n    def initialize(self, args):\n        lorem_ipsum\n",
        "NameError: name 'lorem_ipsum' is not defined",
    ),
    "exits": (
        BODY + "\n    def initialize(self, args):\n        raise SystemExit('enough')\n",
        "SystemExit: enough",
    ),
    "aborts": (
        BODY + "\n    def initialize(self, args):\n        import os; os.abort()\n",
        r"Stub process 'aborts_0' is not healthy\. It was ended by SIGABRT",
    ),
    "aborts_on_import": (
        "import os\nos.abort()\n",
        r"Stub process '' is not healthy\. It was ended by SIGABRT",
    ),
    "completes_wrong": (
        BODY + "\n    @staticmethod\n    def auto_complete_config(config):\n        return None\n",
        (
            "auto_complete_config function in model 'completes_wrong' must return a valid"
            " pb.ModelConfig object."
        ),
    ),
    "completion_raises": (
        BODY + "\n    @staticmethod\n    def auto_complete_config(config):\n        1 / 0\n",
        "ZeroDivisionError: division by zero",
    ),
}


def test_every_broken_model_is_reported_in_one_start_and_the_sound_ones_serve(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    for name, (source, _) in BROKEN.items():
        repository.add(name, source)
    repository.add("misspelt", BODY, "backend: 'python'\nmax_batchsize: 8\n")
    repository.add("on_gpu", BODY, "backend: 'python'\ninstance_group { kind: KIND_GPU }\n")
    repository.add("no_versions", config="backend: 'python'\n")
    (repository.path / "no_versions" / "1").rmdir()
    repository.add("no_file", config="backend: 'python'\n")
    host = serve(repository, "--exit-on-error=false").wait_started()
    for name, (_, pattern) in BROKEN.items():
        assert re.search(rf"failed to load '{name}'.*{pattern}", host.output, re.DOTALL), name
    assert re.search(
        r"failed to load 'misspelt'.*config\.pbtxt.*line 2, column 1.*max_batchsize"
        r".*did you mean 'max_batch_size'",
        host.output,
    )
    assert "at least one version must be available under the version policy of model" in host.output
    assert "Python model file not found in" in host.output
    assert re.search(r"\| identity +\| 1 +\| READY", host.output)
    assert re.search(r"\| raises +\| 1 +\| UNAVAILABLE: Internal: NameError", host.output)
    assert re.search(
        r"\| on_gpu +\| 1 +\| UNAVAILABLE: Invalid argument: instance group on_gpu_0 of model",
        host.output,
    )
    with host.client() as client:
        assert not client.is_server_ready()
        assert client.is_server_live()
        assert client.is_model_ready("identity")
        assert not client.is_model_ready("raises")
        array = np.ones(3, dtype=np.float32)
        client.infer("identity", [tensor("INPUT0", array)])
        states = {m.name: m.state for m in client.get_model_repository_index().models}
        assert states["identity"] == "READY"
        assert states["syntax"] == "UNAVAILABLE"
    wait_until(lambda: len(host.stubs()) == 1, "the stubs of models that failed to end")
    assert host.stop() == 0


def test_a_model_that_cannot_be_read_is_not_known_and_leaves_the_server_ready(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    repository.add("misspelt", BODY, "backend: 'python'\nmax_batchsize: 8\n")
    host = serve(repository, "--exit-on-error=false").wait_started()
    assert re.search(r"\| misspelt +\| - +\| Not loaded: Internal: failed to read", host.output)
    with host.client() as client:
        assert client.is_server_ready()
        for version in ("", "1"):
            assert infer_error(client.get_model_metadata, "misspelt", version) == (
                "StatusCode.NOT_FOUND",
                "Request for unknown model: 'misspelt' is not found",
            )


def test_a_model_without_a_version_is_known_but_not_listed_until_it_is_unloaded(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    versions = repository.add("bare", BODY, "backend: 'python'")
    shutil.rmtree(versions / "1")
    host = serve(repository, "--model-control-mode=explicit").wait_started()
    with host.client() as client:

        def listed() -> list[str]:
            return [model.name for model in client.get_model_repository_index().models]

        assert listed() == ["bare"]
        text = "at least one version must be available under the version policy of model 'bare'"
        text += ": it has no version folder, such as '1' (its name must be a number)"
        assert infer_error(client.load_model, "bare") == (
            "StatusCode.INVALID_ARGUMENT",
            f"load failed for model 'bare': {text}\n",
        )
        assert listed() == []
        assert not client.is_server_ready()
        unknown = "Request for unknown model: 'bare'"
        refused = [infer_error(client.get_model_metadata, "bare", version) for version in ("", "1")]
        assert refused == [
            ("StatusCode.NOT_FOUND", f"{unknown} has no available versions"),
            ("StatusCode.NOT_FOUND", f"{unknown} version 1 is not found"),
        ]
        client.unload_model("bare")
        assert listed() == ["bare"]
        assert client.is_server_ready()


def test_a_broken_model_ends_the_start_by_default(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    repository.add("raises", BROKEN["raises"][0])
    host = serve(repository)
    assert host.process.wait(DEADLINE) == 1
    host.wait_for("error: creating server: Internal - failed to load all models")
    assert "lorem_ipsum" in host.output


def test_a_model_without_config_completes_itself(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = (
        BODY
        + """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config

    def initialize(self, args):
        print("config", args["model_config"])
        print("keys", sorted(args))
        print("args", [args[key] for key in sorted(args) if key != "model_config"])
"""
    )
    path = repository.add("completed", source)
    host = serve(repository).wait_started()
    text = host.wait_for(r"\[completed:1/completed_0\] config (\{.*\})").group(1)
    config = json.loads(text)
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"]["preferred_batch_size"] == [4]
    assert config["instance_group"][0]["name"] == "completed"
    assert config["default_model_filename"] == "model.py"
    host.wait_for(
        re.escape(
            "keys ['model_config', 'model_instance_device_id', 'model_instance_kind',"
            " 'model_instance_name', 'model_name', 'model_repository', 'model_version']"
        )
    )
    host.wait_for(re.escape(f"args ['0', 'CPU', 'completed_0', 'completed', '{path}', '1']"))
    with host.client() as client:
        served = client.get_model_config("completed", as_json=True)["config"]
        assert served["max_batch_size"] == 4
        metadata = client.get_model_metadata("completed")
        assert list(metadata.inputs[0].shape) == [-1, 4]
        assert metadata.platform == "python"
        assert list(metadata.versions) == ["1"]


def test_strict_configuration_wants_a_file(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.add("bare", BODY)
    host = serve(repository, "--disable-auto-complete-config")
    assert host.process.wait(DEADLINE) == 1
    host.wait_for("failed to open text file for read .*config.pbtxt: No such file or directory")


def test_versions_follow_the_policy(repository: RepositoryBuilder, serve: Serve) -> None:
    tell = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            config.add_output({"name": "VERSION", "data_type": "TYPE_INT64", "dims": [1]})
            return config

        def initialize(self, args):
            self.version = int(args["model_version"])
            assert __name__ == f"{self.version}.model", __name__

        def execute(self, requests):
            array = np.array([self.version])
            return [pb_utils.InferenceResponse([pb_utils.Tensor("VERSION", array)])]
    """
    for name, policy in {
        "latest": "",
        "two": "version_policy: { latest: { num_versions: 2 } }",
        "every": "version_policy: { all: {} }",
        "some": "version_policy: { specific: { versions: [1, 7, 10] } }",
    }.items():
        for version in (1, 2, 10):
            repository.add(name, tell, f"backend: 'python' {policy}", version=version)
    host = serve(repository).wait_started()
    assert (
        "version 7 is specified for model 'some', but the version directory is not" in host.output
    )
    with host.client() as client:
        served = {
            name: list(client.get_model_metadata(name).versions)
            for name in ("latest", "two", "every", "some")
        }
        assert served == {
            "latest": ["10"],
            "two": ["2", "10"],
            "every": ["1", "2", "10"],
            "some": ["1", "10"],
        }
        assert client.infer("every", []).as_numpy("VERSION")[0] == 10
        assert client.infer("every", [], model_version="2").as_numpy("VERSION")[0] == 2
        assert client.infer("every", []).get_response().model_version == "10"


def test_instances_are_as_many_and_named_as_the_groups_say(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("none", BODY)
    repository.add(
        "groups", BODY, "backend: 'python' instance_group [{ count: 2 }, { name: 'x', count: 1 }]"
    )
    host = serve(repository).wait_started()
    titles = sorted(" ".join(stub.cmdline()).strip() for stub in host.stubs())
    assert titles == [f"pbhost-stub {n}" for n in ("groups_0_0", "groups_0_1", "none_0", "x_0")]


def test_another_file_name_and_neighbours_of_every_kind(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = """
    import file1
    import shared
    import triton_python_backend_utils as pb_utils
    from . import file2
    from .file2 import VALUE

    assert (file1.VALUE, file2.VALUE, VALUE, shared.VALUE) == (1, 2, 2, 3)

    class TritonPythonModel:
        hint: "pb_utils.Tensor" = None
        unquoted = pb_utils.InferenceRequest

        def execute(self, requests):
            return [pb_utils.InferenceResponse([]) for _ in requests]
    """
    repository.add(
        "named",
        config="backend: 'python' default_model_filename: 'mymodel.py'",
        files={
            "1/mymodel.py": source,
            "1/file1.py": "VALUE = 1\n",
            "1/file2.py": "VALUE = 2\n",
            "shared/__init__.py": "VALUE = 3\n",
        },
    )
    serve(repository).wait_started()


def test_the_stub_gives_a_model_the_documented_environment(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = (
        BODY
        + """
    def initialize(self, args):
        import os, signal, sys
        print("argv", sys.argv, "first", repr(sys.path[0]), "cwd", os.getcwd())
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        print("env", os.environ["MY_ENV"], "and no signal ends it")
        print("tail", [os.path.basename(entry) for entry in sys.path if "surroundings" in entry])
"""
    )
    repository.add("surroundings", source)
    host = serve(repository, env={"MY_ENV": "is here"}).wait_started()
    host.wait_for(r"argv \[''\] first '' cwd ")
    host.wait_for("env is here and no signal ends it")
    host.wait_for(re.escape("tail ['1', 'surroundings']"))


def test_explicit_control_loads_unloads_and_replaces_without_downtime(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave", "identity")
    host = serve(
        repository, "--model-control-mode=explicit", "--load-model=identity"
    ).wait_started()
    with host.client() as client:
        assert client.is_server_ready()
        assert infer_error(run_command, client, "echo x") == (
            "StatusCode.NOT_FOUND",
            "Request for unknown model: 'misbehave' is not found",
        )
        client.load_model("misbehave")
        assert run_command(client, "echo x") == "x"
        pid = run_command(client, "pid")
        client.load_model("misbehave")
        assert run_command(client, "pid") == pid, "an unchanged model was loaded again"

        model = repository.path / "misbehave" / "1" / "model.py"
        good = model.read_text()
        model.write_text("syntax error here\n")
        status, text = infer_error(client.load_model, "misbehave")
        assert status == "StatusCode.INVALID_ARGUMENT"
        assert "load failed for model 'misbehave'" in text
        assert run_command(client, "pid") == pid, (
            "a failed reload must leave the old version serving"
        )
        model.write_text(good)
        client.load_model("misbehave")
        assert run_command(client, "pid") != pid

        client.unload_model("misbehave")
        assert infer_error(run_command, client, "echo x")[1].endswith("has no available versions")

        def state() -> tuple[str, str]:
            models = client.get_model_repository_index().models
            return next((m.state, m.reason) for m in models if m.name == "misbehave")

        wait_until(lambda: state() == ("UNAVAILABLE", "unloaded"), "the unload to end")
        assert client.is_server_ready()
        status, text = infer_error(client.load_model, "missing")
        assert status == "StatusCode.INTERNAL"
        assert text.startswith("failed to load 'missing', failed to poll from model repository")


def test_a_load_may_bring_its_own_configuration(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    host = serve(repository, "--model-control-mode=explicit").wait_started()
    with host.client() as client:
        config = {
            "backend": "python",
            "max_batch_size": 3,
            "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
            "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
        }
        client.load_model("identity", config=json.dumps(config))
        assert client.get_model_config("identity").config.max_batch_size == 3
        assert infer_error(client.load_model, "identity", config='{"max_batch": 3}') == (
            "StatusCode.INTERNAL",
            "failed to load 'identity', failed to poll from model repository",
        )
        host.wait_for("failed to load 'identity': .*Invalid config override: .*max_batch")


def test_loading_is_refused_unless_control_is_explicit(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    host = serve(repository).wait_started()
    with host.client() as client:
        for call in (client.load_model, client.unload_model):
            assert infer_error(call, "identity") == (
                "StatusCode.UNAVAILABLE",
                "explicit model load / unload is not allowed if polling is enabled",
            )


@pytest.mark.parametrize("name", ["a(b)", "x{y}", "semi;colon"])
def test_a_name_that_no_stub_may_have_is_refused(
    repository: RepositoryBuilder, serve: Serve, name: str
) -> None:
    repository.add(name, BODY)
    host = serve(repository)
    assert host.process.wait(DEADLINE) == 1
    assert "Invalid stub name: contains invalid characters" in host.output


def test_the_load_error_has_the_backends_objection_to_the_configuration(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    """Nothing is wrong with the files as such, so the version is there, and has failed."""
    key = "FORCE_CPU_ONLY_INPUT_TENSORS"
    choice = f'parameters {{ key: "{key}" value {{ string_value: "maybe" }} }}'
    repository.add("undecided", BODY, config=f'backend: "python" {choice}')
    repository.add("semi;colon", BODY)
    host = serve(repository, "--model-control-mode=explicit").wait_started()
    reasons = {
        "undecided": f"Unsupported: Incorrect value for {key}: maybe'",
        "semi;colon": "Invalid argument: Invalid stub name: contains invalid characters",
    }
    with host.client() as client:
        for name, reason in reasons.items():
            code, text = infer_error(client.load_model, name)
            assert code == "StatusCode.INVALID_ARGUMENT"
            failed = f"load failed for model '{name}': version 1 is at UNAVAILABLE state: {reason}"
            assert text.startswith(failed)
        index = client.get_model_repository_index().models
    assert {model.name: model.state for model in index} == dict.fromkeys(reasons, "UNAVAILABLE")


def test_templates_are_filled_and_gpus_are_replaced_by_the_cpu(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    config = 'parameters { key: "k" value { string_value: "${where}/x" } } max_batch_size: ${size}'
    config += " instance_group { kind: KIND_GPU }"
    repository.add("m", BODY, 'backend: "python" ' + config)
    (tmp_path / "values.txt").write_text("where=/data\nsize=1\n")
    host = serve(
        repository,
        "--gpu-fallback=cpu",
        "--set=size=4",
        f"--set-file={tmp_path}/values.txt",
        env={"CUDA_VISIBLE_DEVICES": ""},
    ).wait_started()
    with host.client() as client:
        made = client.get_model_config("m", as_json=True)["config"]
    assert made["max_batch_size"] == 4
    assert made["parameters"]["k"]["string_value"] == "/data/x"
    assert made["instance_group"][0]["kind"] == "KIND_CPU"
    assert host.output.count("instance groups of KIND_GPU run on the CPU") == 1


def test_a_template_variable_without_a_value_fails_the_load(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("m", BODY, 'backend: "python"\nmax_batch_size: ${size}')
    host = serve(repository, "--set=other=4", "--exit-on-error=false").wait_started()
    host.wait_for(
        r"config.pbtxt: line 2, column 17: template variable '\$\{size\}' has no value, set it"
        " with --set size=VALUE"
    )
