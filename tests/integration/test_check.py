"""`pbhost check`: reports all problems of a repository without starting a process."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.cli import check as command
from host.config.pbtxt import to_pbtxt
from host.config.schema import new_config
from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, Serve
from tests.integration.test_imports import COPIES
from tests.unit.host.config.test_json_form import fill, messages

PBHOST = Path(sys.executable).with_name("pbhost")
SOUND = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
PLAIN = 'backend: "python"' + TENSORS


def check(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs `pbhost check` in `folder`."""
    called = [PBHOST, "check", *arguments]
    return subprocess.run(called, cwd=folder, capture_output=True, text=True, timeout=DEADLINE)


Checked: TypeAlias = Callable[..., tuple[object, list[str]]]


@pytest.fixture
def checked(
    repository: RepositoryBuilder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Checked:
    """Exits status and lines of a check in the repository's folder, run in this process."""
    monkeypatch.chdir(repository.path)

    def run(*arguments: str) -> tuple[object, list[str]]:
        with pytest.raises(SystemExit) as end:
            command.main(arguments)
        return end.value.code, "".join(capsys.readouterr()).splitlines()

    return run


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def faulty(module_repository: RepositoryBuilder) -> RepositoryBuilder:
    """Many models, each with different errors."""
    add = module_repository.add
    add("sound", SOUND, PLAIN)
    add(
        "misspelt",
        SOUND,
        """\
        backend: "python"
        max_batch_sise: 4
        input { name: "x" data_type: TYPE_FLOAT32 dims: 1 }
        output { name: "y" datatype: TYPE_FP32 dims: "1" }
        instance_group { count: ${COUNT} }
        parameters { key: "A" value { string_value: "${HOME_OF_A}/x" } }
        """,
    )
    add(
        "impossible",
        SOUND,
        f"""\
        {PLAIN.strip()}
        dynamic_batching {{ preferred_batch_size: 4 }}
        sequence_batching {{ oldes {{ }} }}
        model_transaction_policy {{ decoupled: true }}
        response_cache {{ enable: true }}
        instance_group {{ kind: KIND_CPU gpus: 0 }}
        """,
    )
    add("unbatched", SOUND, f"{PLAIN}sequence_batching {{ }} response_cache {{ enable: true }}\n")
    add("versionless", config=PLAIN, files={"1/model.py": SOUND}).joinpath("1").rename(
        module_repository.path / "versionless" / "01"
    )
    add("codeless", config=PLAIN)
    add("broken", "def f(:\n", PLAIN)
    add("classless", "x = 1\n", 'backend: "python')
    add("renamed", SOUND, 'name: "other"' + PLAIN)
    add("unlabelled", SOUND, PLAIN.replace("output {", 'output { label_filename: "l.txt"'))
    add("cold", SOUND, PLAIN + 'model_warmup { name: "w" batch_size: 1 }\n')
    add(
        "placed",
        SOUND,
        PLAIN + 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/no/where" } }',
    )
    add("driven", config='backend: "nonsense"' + TENSORS)
    add(
        "joined",
        config="""\
        platform: "ensemble"
        input { name: "a" data_type: TYPE_FP32 dims: 1 }
        output { name: "b" data_type: TYPE_INT32 dims: 1 }
        ensemble_scheduling { step [
          { model_name: "soun" model_version: -1
            input_map { key: "x" value: "a" } output_map { key: "y" value: "m" } },
          { model_name: "sound"
            input_map { key: "z" value: "m" } output_map { key: "y" value: "b" } }
        ] }
        """,
    )
    (module_repository.path / "unlabelled" / "l.txt").symlink_to("l.txt")
    return module_repository


EXPECTED = """\
broken/1/model.py:1:7: error: SyntaxError: invalid syntax
classless/1/model.py: error: it has no class TritonPythonModel (a model must define this class)
classless/config.pbtxt:1:10: error: backend: expected a quoted string, got '"python'
codeless/config.pbtxt: error: default_model_filename: Python model file not found in
    'codeless/1/model.py' (create this file with the model's code)
cold/config.pbtxt:4:1: error: model_warmup[0]: [request id: <id_unknown>] expected 1 inputs but
    got 0 inputs for model 'cold'. Got input(s) [], but missing required input(s) ['x']. Please
    provide all required input(s).
driven/config.pbtxt:1:1: error: backend: unable to find backend library for backend 'nonsense',
    try specifying runtime on the model configuration.
impossible/config.pbtxt:4:28: error: dynamic_batching.preferred_batch_size[0]: dynamic batching
    preferred size must be <= max batch size for impossible
impossible/config.pbtxt:5:9: error: sequence_batching: fields 'dynamic_batching' and
    'sequence_batching' of ModelConfig are both given, expected one scheduling_choice, first at
    line 4, column 9
impossible/config.pbtxt:5:29: error: sequence_batching.oldes: unknown field 'oldes' in
    ModelSequenceBatching (did you mean 'oldest'?)
impossible/config.pbtxt:7:26: error: response_cache.enable: Response Cache does not currently
    support model impossible with 'decoupled' transaction policy. Please disable the response
    cache.
impossible/config.pbtxt:8:41: error: instance_group[0].gpus: instance group impossible_0 of
    model impossible has kind KIND_CPU but specifies one or more GPUs
joined/config.pbtxt:5:5: error: ensemble_scheduling.step[0].model_name: ensemble joined contains
    models that are not available or ambiguous: soun (did you mean 'sound'?)
joined/config.pbtxt:7:3: error: ensemble_scheduling.step[1].model_version: ensemble 'joined'
    depends on 'sound' whose required version 0 is not loaded. (the default is 0; -1 selects
    the latest version; available versions: 1)
joined/config.pbtxt:8:5: error: ensemble_scheduling.step[1].input_map: in ensemble joined, input
    x in model sound is not mapped to any ensemble tensors
joined/config.pbtxt:8:5: error: ensemble_scheduling.step[1].input_map[z]: in ensemble joined,
    ensemble tensor m is mapping to non-existing input z in model sound
joined/config.pbtxt:8:39: error: ensemble_scheduling.step[1].output_map[y]: in ensemble joined,
    ensemble tensor b: inconsistent data type: TYPE_INT32 is inferred from model joined while
    TYPE_FP32 is inferred from model sound
misspelt/config.pbtxt:2:1: error: max_batch_sise: unknown field 'max_batch_sise' in ModelConfig
    (did you mean 'max_batch_size'?)
misspelt/config.pbtxt:3:30: error: input[0].data_type: expected one of TYPE_INVALID, TYPE_BOOL,
    TYPE_UINT8, TYPE_UINT16, TYPE_UINT32, TYPE_UINT64, TYPE_INT8, TYPE_INT16, TYPE_INT32,
    TYPE_INT64, TYPE_FP16, TYPE_FP32, TYPE_FP64, TYPE_STRING, TYPE_BF16, got 'TYPE_FLOAT32' (did
    you mean 'TYPE_FP32'?)
misspelt/config.pbtxt:4:20: error: output[0].datatype: unknown field 'datatype' in ModelOutput
    (did you mean 'data_type'?)
misspelt/config.pbtxt:4:46: error: output[0].dims[0]: expected int64, got '"1"'
misspelt/config.pbtxt:5:25: error: instance_group[0].count: template variable '${COUNT}' was not
    replaced, expected int32
misspelt/config.pbtxt:6:45: warning: parameters[].value.string_value: template variable
    '${HOME_OF_A}' was not replaced (replace it, unless the model replaces it)
placed/config.pbtxt:4:1: error: parameters: Failed to get the canonical path for /no/where.
renamed/config.pbtxt:1:1: error: name: unexpected directory name 'renamed' for model 'other',
    directory name must equal model name
unbatched/config.pbtxt:4:40: error: response_cache.enable: Response Cache does not currently
    support model unbatched with sequence batching scheduler. Please disable the response cache.
unlabelled/config.pbtxt:3:10: error: output[0].label_filename: failed to open text file for read
    unlabelled/l.txt: Too many levels of symbolic links
versionless/config.pbtxt: warning: ignore version directory '01' which contains leading zeros in
    its directory name
versionless/config.pbtxt: error: version_policy: at least one version must be available under the
    version policy of model 'versionless': it has no version folder, such as '1' (its name must be a
    number) (create the folder versionless/1)
14 models: 26 errors, 2 warnings
"""
"""Indented lines continue the line before."""


def test_all_problems_of_all_models_are_printed_sorted_by_position(
    faulty: RepositoryBuilder,
) -> None:
    done = check(faulty.path, ".")
    assert lines(done) == EXPECTED.replace("\n    ", " ").splitlines()
    assert done.returncode == 1


MISSING_FILES = """\
cased/config.pbtxt: error: default_model_filename: unable to find 'cased/1/model.pt' for model
    'cased' (did you mean 'Model.pt', which is in this folder?)
empty_onnx/config.pbtxt: error: default_model_filename: unable to find
    'empty_onnx/1/model.onnx/model.onnx' for model 'empty_onnx' (put the model's file there, or
    name another file)
frozen/config.pbtxt:1:33: error: default_model_filename: unable to find 'frozen/1/net.graphdef'
    for model 'frozen' (put the model's file there, or name another file)
onnx/config.pbtxt: error: default_model_filename: failed to stat file onnx/1/model.onnx (put the
    model's file there, or name another file)
plan/config.pbtxt: error: default_model_filename: unable to find 'plan/1/model.plan' for model
    'plan' (put the model's file there, or name another file)
plan_by_gpu/config.pbtxt: warning: default_model_filename: unable to find
    'plan_by_gpu/1/model.plan' for model 'plan_by_gpu' (did you mean 'hopper.plan', which is in this
    folder?)
plan_by_gpu/config.pbtxt:4:1: warning: cc_model_filenames[8.0]: unable to find
    'plan_by_gpu/1/ampere.plan' for model 'plan_by_gpu' (did you mean 'hopper.plan', which is in
    this folder?)
renamed/config.pbtxt:1:24: error: default_model_filename: failed to stat file
    renamed/1/resnet50.onnx (did you mean 'resnet.onnx', which is in this folder?)
saved/config.pbtxt: error: default_model_filename: unable to find 'saved/1/model.savedmodel' for
    model 'saved' (put the model's file there, or name another file)
two_versions/config.pbtxt: error: default_model_filename: unable to find
    'two_versions/2/model.pt' for model 'two_versions' (put the model's file there, or name another
    file)
"""


def test_missing_files_of_frameworks_are_found(
    repository: RepositoryBuilder, checked: Checked
) -> None:
    def add(name: str, config: str, *files: str) -> None:
        repository.add(name, config=config + TENSORS, files=dict.fromkeys(files, "content"))

    add("onnx", 'backend: "onnxruntime"', "1/notes.txt")
    add("empty_onnx", 'backend: "onnxruntime"', "1/model.onnx/notes.txt")
    add(
        "renamed",
        'backend: "onnxruntime" default_model_filename: "resnet50.onnx"',
        "1/resnet.onnx",
    )
    add("cased", 'backend: "pytorch"', "1/Model.pt")
    policy = "version_policy { all { } }"
    add("two_versions", f'backend: "pytorch"{policy}', "1/model.pt", "2/notes.txt")
    add("plan", 'platform: "tensorrt_plan"', "1/notes.txt")
    by_gpu = "".join(
        f'\ncc_model_filenames {{ key: "{key}" value: "{name}.plan" }}'
        for key, name in (("9.0", "hopper"), ("8.0", "ampere"))
    )
    add("plan_by_gpu", f'platform: "tensorrt_plan"\n\n{by_gpu.strip()}', "1/hopper.plan")
    add("saved", 'platform: "tensorflow_savedmodel"', "1/model.savedmodel")
    add(
        "frozen",
        'platform: "tensorflow_graphdef" default_model_filename: "net.graphdef"',
        "1/model.savedmodel/x",
    )
    add("sound_file", 'backend: "onnxruntime"', "1/model.onnx")
    add("sound_folder", 'backend: "onnxruntime"', "1/model.onnx/model.onnx")
    add("sound_saved", 'platform: "tensorflow_savedmodel"', "1/model.savedmodel/saved_model.pb")
    status, printed = checked(".")
    assert status == 1
    expected = MISSING_FILES.replace("\n    ", " ").splitlines()
    assert printed == [*expected, "12 models: 8 errors, 2 warnings"]


def test_a_backend_in_place_of_a_framework_may_use_any_file(
    repository: RepositoryBuilder, checked: Checked, tmp_path: Path
) -> None:
    repository.add("m", config='backend: "onnxruntime"' + TENSORS, files={"1/notes.txt": ""})
    assert checked(".")[0] == 1
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "model.py").write_text(SOUND)
    assert checked(".", f"--backend-directory={tmp_path}") == (
        0,
        ["1 model: 0 errors, 0 warnings"],
    )


def test_a_server_refuses_models_whose_framework_files_are_missing(
    repository: RepositoryBuilder, checked: Checked, serve: Serve
) -> None:
    for name, backend in (("graph", "onnxruntime"), ("program", "pytorch")):
        repository.add(name, config=f'backend: "{backend}"' + TENSORS, files={"1/notes.txt": ""})
    _, (graph, program, _) = checked(".")
    host = serve(repository, "--exit-on-error=false").wait_started()
    said = host.output.replace(f"{repository.path}/", "")
    for line in (graph, program):
        assert line.split(": ", 3)[3].partition(" (")[0] in said


def test_template_variables_get_the_given_values(
    repository: RepositoryBuilder, checked: Checked, tmp_path: Path
) -> None:
    config = PLAIN + "instance_group { count: ${count} }\n"
    config += 'parameters { key: "k" value { string_value: "${dir}/${rest}" } }\n'
    repository.add("m", SOUND, config)
    (tmp_path / "values.txt").write_text("# values\ndir=/d\ncount=x\n")
    given = (f"--set-file={tmp_path}/values.txt", "--set", "count=2")
    status, printed = checked(".", *given)
    assert (status, len(printed)) == (1, 2)
    assert printed[0].startswith("m/config.pbtxt:5:45: error: parameters[].value.string_value: ")
    assert "template variable '${rest}' was not replaced" in printed[0]
    assert checked(".", *given, "--set=rest=r") == (0, ["1 model: 0 errors, 0 warnings"])


@pytest.fixture(scope="module")
def found(faulty: RepositoryBuilder) -> Any:
    """The output in JSON format."""
    done = check(faulty.path, ".", "--format=json")
    assert done.returncode == 1
    return json.loads(done.stdout)


def test_the_json_format_has_the_same_problems(found: Any) -> None:
    assert (found["models"], found["errors"], found["warnings"]) == (14, 26, 2)
    assert len(found["problems"]) == 28
    assert found["problems"][0] == {
        "severity": "error",
        "file": "broken/1/model.py",
        "line": 1,
        "column": 7,
        "field": "",
        "problem": "SyntaxError: invalid syntax",
        "suggestion": "",
    }
    assert found["problems"][-2]["line"] is None
    (misspelt,) = [one for one in found["problems"] if one["field"] == "max_batch_sise"]
    assert misspelt["suggestion"] == "did you mean 'max_batch_size'?"


def test_a_server_refuses_exactly_the_models_with_errors(
    faulty: RepositoryBuilder, found: Any, module_serve: Serve
) -> None:
    errors: dict[str, list[str]] = {}
    for one in found["problems"]:
        if one["severity"] == "error":
            errors.setdefault(one["file"].split("/")[0], []).append(one["problem"])
    host = module_serve(faulty, "--exit-on-error=false").wait_started()
    with host.client() as client:
        index = client.get_model_repository_index()
    assert index is not None
    refused = set(os.listdir(faulty.path)) - {
        model.name for model in index.models if model.state == "READY"
    }
    assert refused == errors.keys()
    said = host.output.replace(f"{faulty.path}/", "")  # the check prints paths as they were given
    for name in refused:
        known = [text for text in errors[name] if text.removeprefix("SyntaxError: ") in said]
        assert known, f"{name} is refused for none of {errors[name]}"


def test_an_unreadable_file_is_a_problem_and_not_a_crash(repository: RepositoryBuilder) -> None:
    for name in ("latin", "deep", "folder", "loop", "fifo", "locked"):
        repository.add(name, SOUND)
    files = {name: repository.path / name / "config.pbtxt" for name in os.listdir(repository.path)}
    files["latin"].write_bytes(b'backend: "pyth\xf6n"')
    files["deep"].write_text("input { reshape { a [" * 5000)
    files["folder"].mkdir()
    files["loop"].symlink_to("config.pbtxt")
    os.mkfifo(files["fifo"])
    files["locked"].symlink_to("/proc/self/mem")  # unreadable even for root
    (repository.path / "round").symlink_to(".")  # a folder that contains itself
    os.mkdir(os.fsencode(repository.path) + b"/odd\xff")
    done = check(repository.path, ".")
    assert done.returncode == 1
    found = {line.split(":")[0] for line in lines(done) if ": error: " in line}
    assert {path.split("/")[0] for path in found} == {*files, "round", r"odd\udcff"}


def test_a_dangling_link_in_a_repository_is_a_problem_as_for_servers(
    repository: RepositoryBuilder, checked: Checked
) -> None:
    (repository.path / "gone").symlink_to("nowhere")
    assert checked(".") == (
        1,
        [
            ".: error: failed to poll model repository '.': failed to stat file gone",
            "0 models: 1 error, 0 warnings",
        ],
    )


def test_warnings_fail_the_check_only_with_strict(
    repository: RepositoryBuilder, checked: Checked
) -> None:
    repository.add("m", SOUND, PLAIN + 'parameters { key: "A" value { string_value: "${B}" } }')
    status, (warning, _) = checked(".")
    assert warning.startswith("m/config.pbtxt:4:45: warning: parameters")
    assert status == 0
    status, (error, _) = checked(".", "--strict")
    assert error == warning.replace("warning", "error")
    assert status == 1


def test_fields_that_a_model_may_complete_are_checked_only_in_strict_mode(
    repository: RepositoryBuilder, checked: Checked
) -> None:
    completing = SOUND + "    @staticmethod\n    def auto_complete_config(config): return config\n"
    repository.add("m", completing, 'backend: "python" input { name: "x" }')
    repository.add("bare", completing)
    assert checked(".") == (0, ["2 models: 0 errors, 0 warnings"])
    status, said = checked(".", "--disable-auto-complete-config")
    assert status == 1
    assert [line.split(": ")[:3] for line in said[:-1]] == [
        ["bare", "error", "failed to open text file for read bare/config.pbtxt"],
        ["m/config.pbtxt:1:19", "error", "input[0].data_type"],
        ["m/config.pbtxt:1:19", "error", "input[0].dims"],
    ]


def test_models_of_this_project_have_no_problems() -> None:
    done = check(ROOT, "model_repository", "tests/models")
    assert lines(done) == [lines(done)[-1]]
    assert done.returncode == 0


def test_a_custom_configuration_is_checked_in_place_of_config_pbtxt(
    repository: RepositoryBuilder, checked: Checked
) -> None:
    repository.add("m", SOUND, "nonsense", files={"configs/good.pbtxt": PLAIN})
    assert checked(".")[0] == 1
    assert checked(".", "--model-config-name=good")[0] == 0


def test_a_model_in_two_repositories_is_a_problem(
    repository: RepositoryBuilder, checked: Checked
) -> None:
    for name in ("a", "b"):
        RepositoryBuilder(repository.path / name).add("m", SOUND, PLAIN)
    status, said = checked("a", "b")
    assert said[0] == "a/m: error: model 'm' is not unique across all model repositories"
    assert status == 1


def test_a_folder_without_code_gets_advice(repository: RepositoryBuilder, checked: Checked) -> None:
    (repository.path / "hollow" / "1").mkdir(parents=True)
    status, said = checked(".")
    assert said[0].startswith("hollow: error: backend: Invalid model name: Could not determine")
    assert said[0].endswith("(create hollow/1/model.py, or set 'backend')")
    assert status == 1


def test_files_with_the_names_of_the_api_are_warnings(
    repository: RepositoryBuilder, checked: Checked
) -> None:
    repository.add("m", SOUND, PLAIN)
    for name, (line, files, _) in COPIES.items():
        repository.add(name, f"{line}\n{SOUND}", PLAIN, files=files)
    own = {"1/pb_utils.py": "", "1/mine/triton_python_backend_utils.py": "from pb_utils import *"}
    repository.add("own", SOUND, PLAIN, files=own)
    data = {f"1/data/with-hyphen/{name}": text for name, text in COPIES["old"][1].items()}
    repository.add("not_importable", SOUND, PLAIN, files=data)
    status, found = checked(".")
    advice = dict.fromkeys(COPIES, "the file can be deleted")
    advice["in_a_package"] = (
        "import 'triton_python_backend_utils' without a package, and delete the file"
    )
    assert (status, found) == (
        0,
        [
            *sorted(
                f"{name}/{file}: warning: it is not imported: pbhost's own module is used in its"
                f" place ({advice[name]})"
                for name, (_, _, file) in COPIES.items()
            ),
            f"{len(COPIES) + 3} models: 0 errors, {len(COPIES)} warnings",
        ],
    )


def test_a_misuse_has_an_exit_status_of_its_own(tmp_path: Path) -> None:
    done = check(tmp_path, "nowhere")
    assert (done.stdout, done.stderr) == ("", "pbhost check: 'nowhere' does not exist\n")
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "required: REPOSITORY"),
        (("--sing", "."), "unrecognized option '--sing'"),
        (("m",), "'m' is a model directory, expected a model repository:"),
        (("m/config.pbtxt",), "'m/config.pbtxt' is a file, expected a model repository"),
    ],
    ids=["nothing", "flag", "model", "file"],
)
def test_every_misuse_is_explained(
    repository: RepositoryBuilder, checked: Checked, arguments: tuple[str, ...], said: str
) -> None:
    repository.add("m", SOUND, PLAIN)
    status, found = checked(*arguments)
    assert said in found[-1]
    assert status == 2


ENSEMBLE = """platform: "ensemble"
input { name: "I" data_type: TYPE_FP32 dims: 1 }
output { name: "O" data_type: TYPE_FP32 dims: 1 }
output { name: "O" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling { step { model_name: "m" model_version: -1
  input_map { key: "x" value: "I" } output_map { key: "y" value: "O" } } }
"""


def test_names_that_are_listed_twice_and_a_missing_version_folder_are_warnings(
    repository: RepositoryBuilder, checked: Checked
) -> None:
    repository.add("m", SOUND, PLAIN)
    repository.add("e", config=ENSEMBLE).joinpath("1").rmdir()
    twice = 'input { name: "x" data_type: TYPE_FP32 dims: 1 }'
    repository.add("n", SOUND, PLAIN + twice)
    status, said = checked(".")
    assert said == [
        (
            "e/config.pbtxt:1:1: warning: platform: the ensemble has no version folder: pbhost"
            " serves version 1, Triton refuses it (create the folder e/1, with an empty file if a"
            " tool drops empty folders)"
        ),
        (
            "e/config.pbtxt:4:10: warning: output[1].name: output 'O' is listed more than once: a"
            " response contains it once (remove this entry)"
        ),
        (
            "n/config.pbtxt:4:9: warning: input[1].name: input 'x' is listed more than once: the"
            " entries count as one; Triton refuses every request to the model (remove this entry)"
        ),
        "3 models: 0 errors, 3 warnings",
    ]
    assert status == 0
    repository.add("bare", config=PLAIN).joinpath("1").rmdir()
    assert checked(".")[0] == 1  # an ordinary model needs a version folder


def flow(inputs: str, *steps: tuple[str, str]) -> str:
    """An ensemble with the output O; a step is the tensors that it reads and those it writes."""
    text = 'platform: "ensemble" output { name: "O" data_type: TYPE_FP32 dims: 1 }\n'
    for name in inputs.split():
        text += f'input {{ name: "{name}" data_type: TYPE_FP32 dims: 1 }}\n'
    text += "ensemble_scheduling {\n"
    for read, written in steps:
        maps = [f'input_map {{ key: "x" value: "{name}" }}' for name in read.split()]
        maps += [f'output_map {{ key: "y" value: "{name}" }}' for name in written.split()]
        text += f'step {{ model_name: "m" model_version: -1 {" ".join(maps)} }}\n'
    return text + "}\n"


def test_an_ensemble_that_reads_a_tensor_without_a_writer_hides_no_other_problem(
    repository: RepositoryBuilder, checked: Checked
) -> None:
    repository.add("m", SOUND, PLAIN)
    repository.add("other", "x = 1", PLAIN)
    repository.add("e", config=flow("IN", ("INN", "O")))
    repository.add("f", config=flow("IN", ("IN", "one"), ("onee", "two"), ("two", "O")))
    status, said = checked(".")
    assert status == 1
    assert [line.partition(": error: ")[2] for line in said[:-1]] == [
        (
            "output[0].name: output 'O' for ensemble 'e' is not written: at least one of its"
            " depending tensors, 'INN', is not connected"
        ),
        "input[0].name: ensemble input 'IN' for ensemble e' is not used",
        (
            "output[0].name: output 'O' for ensemble 'f' is not written: at least one of its"
            " depending tensors, 'onee', is not connected"
        ),
        "ensemble_scheduling: ensemble tensor 'one' is unused in ensemble 'f'",
        "it has no class TritonPythonModel (a model must define this class)",
    ]


@pytest.mark.parametrize(
    ("config", "model", "problem"),
    [
        ('backend: "nowhere"', None, "unable to find backend library"),
        ('backend: "python"', None, "Python model file not found"),
        ('backend: "python" version_policy { specific { versions: 7 } }', SOUND, "at least one"),
        ("", None, "Could not determine backend"),
    ],
    ids=["unknown backend", "no code", "no version", "no backend"],
)
def test_an_ensemble_is_not_compared_with_a_model_whose_tensors_are_unknown(
    repository: RepositoryBuilder, checked: Checked, config: str, model: str | None, problem: str
) -> None:
    repository.add("m", model, config)
    repository.add("e", config=flow("I", ("I", "O")))
    _, said = checked(".")
    (line,) = (line for line in said if ": error: " in line)
    assert line.startswith("m/")
    assert problem in line


NAMES = st.sampled_from(["I", "O", "a", "b", ""])
FLOWS = st.builds(
    flow,
    st.sampled_from(["I", "I O", "", "a a"]),
    *[st.tuples(NAMES, NAMES | st.just("a b"))] * 3,
)
BASES = [
    PLAIN,
    ENSEMBLE,
    PLAIN
    + """
        max_batch_size: 8
        version_policy { specific { versions: [1, 2] } }
        instance_group [ { count: 2 kind: KIND_CPU } ]
        sequence_batching { oldest { max_candidate_sequences: 4 }
          state { input_name: "s" output_name: "t" data_type: TYPE_INT32 dims: [1]
            initial_state { name: "i" data_type: TYPE_INT32 dims: [1] zero_data: true } } }
        model_warmup { name: "w" batch_size: 1 inputs { key: "x"
          value { data_type: TYPE_FP32 dims: 1 random_data: true } } }
        parameters { key: "OPENAI_KIND" value { string_value: "chat" } }
    """,
]
TOKENS = [re.findall(r'"[^"]*"|\w+|\S', base) for base in BASES]
DAMAGE = {"-1", "1e99", "${v}", "'", '"\\xff'}
WORDS = sorted({word for tokens in TOKENS for word in tokens} | DAMAGE)


@st.composite
def damaged_texts(draw: st.DrawFn) -> str:
    tokens = list(draw(st.sampled_from(TOKENS)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(tokens) - 1))
        tokens[at : at + draw(st.integers(0, 2))] = draw(
            st.lists(st.sampled_from(WORDS), max_size=2)
        )
    return " ".join(tokens)


CONFIGS = (
    FLOWS
    | damaged_texts()
    | messages(new_config().DESCRIPTOR).map(lambda content: to_pbtxt(fill(new_config(), content)))
)


@given(st.lists(CONFIGS, min_size=3, max_size=3))
def test_every_damaged_configuration_is_reported_without_an_exception(
    tmp_path_factory: pytest.TempPathFactory, configs: Sequence[str]
) -> None:
    repository = RepositoryBuilder(tmp_path_factory.mktemp("damaged"))
    for name, config in zip("ems", configs, strict=True):
        repository.add(name, SOUND, config)
    said = io.TextIOWrapper(io.BytesIO())
    with redirect_stdout(said), redirect_stderr(said), pytest.raises(SystemExit) as end:
        command.main([str(repository.path)])
    assert end.value.code in (0, 1)
