"""The test harness of pb_utils.testing."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from c_python_backend_utils import shared_memory
from pb_utils import testing
from pb_utils.testing import LogRecord

CONFIG = {
    "name": "doubler",
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [
        {"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "Z", "data_type": "TYPE_FP32", "dims": [-1]},
    ],
}


class Doubler:
    """Returns twice X as Y, and X as Z."""

    def execute(self, requests: list[Any]) -> Any:
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X")
            assert x is not None
            outputs = [
                pb_utils.Tensor("Y", 2 * x.as_numpy()),
                pb_utils.Tensor("Z", x.as_numpy()),
            ]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses


def model_of(execute: Callable[[Any], Any]) -> type[Any]:
    """Returns a model class whose ``execute`` is a function of the requests."""
    return type("Model", (), {"execute": lambda self, requests: execute(requests)})


def calling_model(name: str) -> type[Any]:
    """Returns a model class that sends its input X to another model and returns the output Y."""

    def execute(requests: Any) -> Any:
        responses = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name=name, inputs=request.inputs(), requested_output_names=["Y"]
            )
            answer = call.exec()
            responses.append(
                pb_utils.InferenceResponse(error=answer.error())
                if answer.has_error()
                else pb_utils.InferenceResponse(answer.output_tensors())
            )
        return responses

    return model_of(execute)


x = np.array([1, 2], np.float32)


class TestInfer:
    def test_returns_outputs_by_name(self) -> None:
        with testing.load(Doubler, CONFIG) as model:
            outputs = model.infer({"X": x})
        assert {name: array.tolist() for name, array in outputs.items()} == {
            "Y": [2, 4],
            "Z": [1, 2],
        }

    def test_drops_outputs_that_were_not_requested(self) -> None:
        with testing.load(Doubler, CONFIG) as model:
            assert list(model.infer({"X": x}, requested_outputs=["Z"])) == ["Z"]

    def test_without_configured_outputs_returns_all(self) -> None:
        with testing.load(Doubler) as model:
            assert set(model.infer({"X": x})) == {"Y", "Z"}

    def test_an_output_outside_the_configuration_is_an_error(self) -> None:
        config = {**CONFIG, "output": CONFIG["output"][:1]}
        with testing.load(Doubler, config) as model:
            text = "model 'doubler' returned an output 'Z', which its configuration does not have"
            with pytest.raises(pb_utils.TritonModelException, match=text):
                model.infer({"X": x})
            (response,) = model.execute([model.request({"X": x}, requested_outputs=["Y"])])
            error = response.error()
            assert error is not None and text in error.message()

    def test_gives_the_model_private_writable_inputs(self) -> None:
        def execute(requests: Any) -> Any:
            array = requests[0].inputs()[0].as_numpy()
            array[:] = 7
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)])]

        given = np.zeros(2)
        given.flags.writeable = False
        with testing.load(model_of(execute)) as model:
            assert model.infer({"X": given})["Y"].tolist() == [7, 7]
        assert given.tolist() == [0, 0]

    @pytest.mark.parametrize("text", [["a", "\u00e4"], [b"a", "\u00e4".encode()]])
    def test_text_arrives_as_objects_of_bytes(self, text: Any) -> None:
        seen: list[Any] = []

        def execute(requests: Any) -> Any:
            seen.append(requests[0].inputs()[0].as_numpy())
            outputs = np.array(["y", 5], dtype=np.object_)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", outputs)])]

        with testing.load(model_of(execute)) as model:
            assert model.infer({"X": np.array(text)})["Y"].tolist() == [b"y", b"5"]
        assert seen[0].dtype == np.object_
        assert seen[0].tolist() == [b"a", "\u00e4".encode()]

    def test_bf16_inputs_and_outputs_work(self) -> None:
        def execute(requests: Any) -> Any:
            return [pb_utils.InferenceResponse(requests[0].inputs())]

        array = np.array([1.5], ml_dtypes.bfloat16)
        with testing.load(model_of(execute)) as model:
            assert model.infer({"X": array})["X"].dtype == ml_dtypes.bfloat16

    def test_shows_the_request_to_the_model(self) -> None:
        seen: list[Any] = []

        def execute(requests: Any) -> Any:
            request = requests[0]
            seen.append(
                (
                    request.request_id(),
                    json.loads(request.parameters()),
                    request.requested_output_names(),
                    request.is_cancelled(),
                )
            )
            return [pb_utils.InferenceResponse()]

        with testing.load(model_of(execute), CONFIG) as model:
            model.infer({}, request_id="7", parameters={"a": 1}, requested_outputs=["Y"])
            model.execute([model.request({}, cancelled=True)])
        assert seen == [("7", {"a": 1}, {"Y"}, False), ("", {}, {"Y", "Z"}, True)]

    def test_an_error_response_raises_its_message(self) -> None:
        def execute(requests: Any) -> Any:
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError("too long"))]

        with (
            testing.load(model_of(execute)) as model,
            pytest.raises(pb_utils.TritonModelException, match="^too long$"),
        ):
            model.infer({})

    def test_free_memory_raises(self) -> None:
        def execute(requests: Any) -> Any:
            return [shared_memory.free_memory()]

        with (
            testing.load(model_of(execute)) as model,
            pytest.raises(pb_utils.TritonModelException, match="no shared memory in a test"),
        ):
            model.infer({})

    def test_exception_of_execute_is_raised(self) -> None:
        def execute(requests: Any) -> Any:
            raise ZeroDivisionError("boom")

        with testing.load(model_of(execute)) as model, pytest.raises(ZeroDivisionError):
            model.infer({})

    def test_a_coroutine_is_awaited_even_inside_a_loop(self) -> None:
        class Model:
            async def execute(self, requests: Any) -> Any:
                await asyncio.sleep(0)
                pb_utils.Logger.log_info("async")
                return [pb_utils.InferenceResponse(requests[0].inputs())]

        async def test(model: testing.ModelHarness) -> Any:
            return model.infer({"X": x})

        with testing.load(Model) as model:
            assert asyncio.run(test(model))["X"].tolist() == [1, 2]
            assert [record.message for record in model.logs] == ["async"]


class TestExecute:
    def test_returns_responses_in_order(self) -> None:
        with testing.load(Doubler, CONFIG) as model:
            responses = model.execute([model.request({"X": x}), model.request({"X": 2 * x})])
        tensors = [pb_utils.get_output_tensor_by_name(response, "Y") for response in responses]
        assert [tensor and tensor.as_numpy().tolist() for tensor in tensors] == [[2, 4], [4, 8]]

    def test_an_error_fails_only_its_own_request(self) -> None:
        def execute(requests: Any) -> Any:
            error = pb_utils.TritonError("no", pb_utils.TritonError.INVALID_ARG)
            return [pb_utils.InferenceResponse(error=error), pb_utils.InferenceResponse()]

        with testing.load(model_of(execute)) as model:
            first, second = model.execute([model.request({}), model.request({})])
        error = first.error()
        assert error is not None
        assert error.code() == pb_utils.TritonError.INVALID_ARG
        assert not second.has_error()

    @pytest.mark.parametrize(
        ("returned", "text"),
        [
            ((), "Expected a list in the execute return, found type '<class 'tuple'>'."),
            (
                [],
                (
                    "Number of InferenceResponse objects do not match the number of "
                    "InferenceRequest objects. InferenceRequest(s) size is:1, and "
                    "InferenceResponse(s) size is:0\n"
                ),
            ),
            (
                ["x"],
                (
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    "found type '<class 'str'>'."
                ),
            ),
            ([None], "The request at index 0 got no response."),
            (None, "The request at index 0 got no response."),
        ],
    )
    def test_rejects_return_values_that_a_server_rejects(self, returned: Any, text: str) -> None:
        with testing.load(model_of(lambda requests: returned)) as model:
            with pytest.raises(pb_utils.TritonModelException) as caught:
                model.infer({})
            assert str(caught.value) == text

    def test_refuses_a_response_to_a_rescheduled_request(self) -> None:
        def execute(requests: Any) -> Any:
            requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return [pb_utils.InferenceResponse()]

        with testing.load(model_of(execute)) as model:
            with pytest.raises(pb_utils.TritonModelException) as caught:
                model.infer({})
            assert str(caught.value) == (
                "Expected a None object in the execute function return list for reschduled "
                "request, found type '<class 'c_python_backend_utils.InferenceResponse'>'."
            )

    def test_missing_execute_is_an_error(self) -> None:
        class Model:
            """A model without methods."""

        with (
            testing.load(Model) as model,
            pytest.raises(
                pb_utils.TritonModelException,
                match=r"^Python model .*test_testing\.py does not implement `execute` method\.$",
            ),
        ):
            model.infer({})


class TestLifecycle:
    def test_initialize_gets_the_seven_arguments(self) -> None:
        class Model:
            def initialize(self, args: dict[str, str]) -> None:
                self.args = args

        with testing.load(Model, CONFIG, version=3, parameters={"k": "v"}) as model:
            args = model.model.args
            assert args == model.args
        config = json.loads(args.pop("model_config"))
        assert args == {
            "model_instance_kind": "CPU",
            "model_instance_name": "doubler_0",
            "model_instance_device_id": "0",
            "model_repository": str(Path(__file__).parent),
            "model_version": "3",
            "model_name": "doubler",
        }
        assert config["parameters"] == {"k": {"string_value": "v"}}
        assert config["max_batch_size"] == 0
        assert config["input"][0]["optional"] is False
        assert model.config == config

    def test_the_configuration_may_be_json_text(self) -> None:
        with testing.load(Doubler, json.dumps(CONFIG)) as model:
            assert model.args["model_name"] == "doubler"

    def test_a_model_without_inputs_completes_its_configuration(self) -> None:
        class Model(Doubler):
            @staticmethod
            def auto_complete_config(config: Any) -> Any:
                config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
                config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
                config.set_max_batch_size(4)
                return config

        with testing.load(Model, name="m") as model:
            assert model.config["max_batch_size"] == 4
            assert [one["name"] for one in model.config["output"]] == ["Y"]
        with testing.load(Model, CONFIG) as model:
            assert model.config["max_batch_size"] == 0

    def test_a_completed_configuration_must_be_returned(self) -> None:
        class Model:
            @staticmethod
            def auto_complete_config(config: Any) -> None: ...

        with pytest.raises(pb_utils.TritonModelException) as caught:
            testing.load(Model, name="no_return")
        assert str(caught.value) == (
            "auto_complete_config function in model 'no_return' must return a valid pb.ModelConfig "
            "object."
        )

    def test_a_model_whose_getattr_raises_another_error_is_served_as_by_a_server(self) -> None:
        class Model(Doubler):
            def __getattr__(self, name: str) -> Any:
                raise KeyError(name)

        with testing.load(Model, CONFIG) as model:
            assert model.is_ready()
            assert model.infer({"X": x})["Y"].tolist() == [2, 4]
        with testing.load(type("Empty", (), {"__getattr__": Model.__getattr__})) as empty:
            with pytest.raises(pb_utils.TritonModelException, match="not implement `execute`"):
                empty.infer({})

    def test_the_error_of_a_property_that_gives_execute_is_shown(self) -> None:
        class Model:
            @property
            def execute(self) -> Any:
                raise ImportError("libcudnn is missing")

        with testing.load(Model) as model:
            with pytest.raises(ImportError, match="^libcudnn is missing$"):
                model.infer({})

    def test_finalize_runs_once_at_the_end(self) -> None:
        calls: list[str] = []

        class Model(Doubler):
            def finalize(self) -> None:
                calls.append("finalize")

        with testing.load(Model) as model:
            assert calls == []
        model.close()
        assert calls == ["finalize"]
        with pytest.raises(pb_utils.TritonModelException, match="finalized"):
            model.infer({"X": x})

    def test_logs_are_kept_with_their_position(self) -> None:
        class Model:
            def initialize(self, args: Any) -> None:
                pb_utils.Logger.log_warn("from initialize")

            def execute(self, requests: Any) -> Any:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(pb_utils.Logger.log_info, "from a thread").result()
                return [pb_utils.InferenceResponse()]

            def finalize(self) -> None:
                pb_utils.Logger.log_error("from finalize")

        with testing.load(Model) as model:
            model.infer({})
        assert [(record.level, record.message) for record in model.logs] == [
            (pb_utils.Logger.WARNING, "from initialize"),
            (pb_utils.Logger.INFO, "from a thread"),
            (pb_utils.Logger.ERROR, "from finalize"),
        ]
        assert isinstance(model.logs[0], LogRecord)
        assert model.logs[0].filename == "test_testing.py"


class TestOtherModels:
    def test_function_can_stand_in_for_a_model(self) -> None:
        def triple(request: Any) -> Any:
            array = request.inputs()[0].as_numpy()
            return pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", 3 * array), pb_utils.Tensor("OTHER", array)]
            )

        with testing.load(calling_model("triple"), models={"triple": triple}) as model:
            outputs = model.infer({"X": x})
        assert list(outputs) == ["Y"]
        assert outputs["Y"].tolist() == [3, 6]

    def test_constant_outputs_can_stand_in_for_a_model(self) -> None:
        with testing.load(
            calling_model("fixed"), models={"fixed": {"Y": np.array(["a"])}}
        ) as model:
            assert model.infer({"X": x})["Y"].tolist() == [b"a"]

    def test_harness_can_stand_in_for_a_model(self) -> None:
        with (
            testing.load(Doubler, CONFIG) as doubler,
            testing.load(calling_model("doubler"), models={"doubler": doubler}) as model,
        ):
            assert model.infer({"X": x})["Y"].tolist() == [2, 4]

    def test_an_unknown_model_is_an_error_response(self) -> None:
        with testing.load(calling_model("missing")) as model:
            with pytest.raises(pb_utils.TritonModelException) as caught:
                model.infer({"X": x})
            assert str(caught.value) == (
                "Model missing - Error when running inference: Request for unknown model: "
                "'missing' is not found"
            )

    def test_failures_of_other_models_are_error_responses(self) -> None:
        def fails(request: Any) -> Any:
            raise pb_utils.TritonModelException("out of order")

        def execute(requests: Any) -> Any:
            raise ValueError("boom")

        with testing.load(calling_model("fails"), models={"fails": fails}) as model:
            with pytest.raises(pb_utils.TritonModelException, match="^out of order$"):
                model.infer({"X": x})
        with testing.load(model_of(execute), name="broken") as broken:
            with testing.load(calling_model("broken"), models={"broken": broken}) as model:
                with pytest.raises(pb_utils.TritonModelException) as caught:
                    model.infer({"X": x})
        assert str(caught.value) == (
            "Failed to process the request(s) for model 'broken_0', message: ValueError: boom"
        )

    def test_async_requests_work(self) -> None:
        class Model:
            async def execute(self, requests: Any) -> Any:
                call = pb_utils.InferenceRequest(
                    model_name="fixed", inputs=[], requested_output_names=[]
                )
                answers = await asyncio.gather(call.async_exec(), call.async_exec())
                return [pb_utils.InferenceResponse(answers[1].output_tensors())]

        with testing.load(Model, models={"fixed": {"Y": x}}) as model:
            assert model.infer({})["Y"].tolist() == [1, 2]

    @pytest.mark.parametrize("when", ["initialize", "finalize"])
    def test_bls_is_rejected_outside_of_execute(self, when: str) -> None:
        def send_request(*_: Any) -> None:
            pb_utils.InferenceRequest(model_name="m", inputs=[], requested_output_names=[]).exec()

        with (
            pytest.raises(
                pb_utils.TritonModelException,
                match=r"^BLS is only supported during the 'execute' function\.$",
            ),
            testing.load(type("Model", (), {when: send_request}), models={"m": {}}),
        ):
            pass


class TestFolders:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        version = tmp_path / "greeter" / "2"
        version.mkdir(parents=True)
        (tmp_path / "greeter" / "1").mkdir()
        (version / "words.py").write_text("HELLO = 'hello'\n")
        (tmp_path / "greeter" / "shared_words.py").write_text("BYE = 'bye'\n")
        (version / "model.py").write_text(
            "import numpy as np\n"
            "import triton_python_backend_utils as pb_utils\n"
            "import words, shared_words\n"
            "from .words import HELLO\n"
            "class TritonPythonModel:\n"
            "    def execute(self, requests):\n"
            "        text = [__name__, __package__, HELLO, words.HELLO, shared_words.BYE,\n"
            "                pb_utils.get_model_dir()]\n"
            "        out = pb_utils.Tensor('OUT', np.array(text, dtype=object))\n"
            "        return [pb_utils.InferenceResponse([out]) for _ in requests]\n"
        )
        return tmp_path / "greeter"

    def test_the_highest_version_is_imported_as_a_stub_does(self, folder: Path) -> None:
        with testing.load(folder) as model:
            assert [text.decode() for text in model.infer({})["OUT"]] == [
                "2.model",
                "2",
                "hello",
                "hello",
                "bye",
                str(folder / "2"),
            ]
            assert model.args["model_repository"] == str(folder)
            assert model.args["model_name"] == "greeter"
            assert model.args["model_version"] == "2"

    def test_close_removes_the_modules_of_the_model(self, folder: Path) -> None:
        paths, modules = list(sys.path), set(sys.modules)
        with testing.load(str(folder)):
            assert "2.model" in sys.modules
        assert sys.path == paths
        assert not {"2", "2.model", "2.words", "words", "shared_words"} & set(sys.modules) - modules

    def test_failed_import_removes_the_modules_of_the_model(self, folder: Path) -> None:
        (folder / "2" / "model.py").write_text("import words\nraise ValueError('boom')\n")
        paths = list(sys.path)
        with pytest.raises(ValueError, match="boom"):
            testing.load(folder)
        assert sys.path == paths
        assert "words" not in sys.modules

    def test_models_with_the_same_version_number_do_not_mix(
        self, folder: Path, tmp_path: Path
    ) -> None:
        other = tmp_path / "other" / "2"
        other.mkdir(parents=True)
        (other / "words.py").write_text("HELLO = 'other'\n")
        (tmp_path / "other" / "shared_words.py").write_text("BYE = 'other'\n")
        (other / "model.py").write_text((folder / "2" / "model.py").read_text())
        with testing.load(folder):
            pass
        with testing.load(tmp_path / "other") as model:
            assert model.infer({})["OUT"].tolist()[2:5] == [b"other"] * 3

    def test_the_file_may_have_another_name(self, folder: Path) -> None:
        (folder / "2" / "model.py").rename(folder / "2" / "mine.py")
        with testing.load(folder, {"default_model_filename": "mine.py"}) as model:
            assert model.infer({})["OUT"][0] == b"2.mine"

    def test_the_file_may_lie_in_a_folder_of_the_version(self, folder: Path) -> None:
        (folder / "2" / "code").mkdir()
        (folder / "2" / "code" / "mine.py").write_text("class TritonPythonModel:\n    pass\n")
        with testing.load(folder, {"default_model_filename": "code/mine.py"}) as model:
            assert type(model.model).__module__ == "2.code.mine"

    def test_a_missing_file_is_named(self, folder: Path) -> None:
        with pytest.raises(pb_utils.TritonModelException) as caught:
            testing.load(folder, version=1)
        assert str(caught.value) == f"Python model file not found in '{folder}/1/model.py'"
        with pytest.raises(pb_utils.TritonModelException) as caught:
            testing.load(folder, {"default_model_filename": "model.txt"})
        assert str(caught.value) == ("Model name must end with '.py'. Model name is \"model.txt\".")

    def test_a_folder_without_versions_is_refused(self, tmp_path: Path) -> None:
        for name in ("01", "²", "assets"):
            (tmp_path / name).mkdir()
        (tmp_path / "3").touch()
        with pytest.raises(pb_utils.TritonModelException, match="no version folder"):
            testing.load(tmp_path)

    def test_version_zero_is_loaded_if_asked_for(self, folder: Path) -> None:
        with pytest.raises(pb_utils.TritonModelException, match="/0/model.py'"):
            testing.load(folder, version=0)


def test_preload_is_called_once_before_the_model_is_made() -> None:
    class Prepared(Doubler):
        calls: list[dict[str, str]] = []

        @staticmethod
        def preload(args: dict[str, str]) -> None:
            Prepared.calls.append(args)

        def initialize(self, args: dict[str, str]) -> None:
            (given,) = self.calls
            assert given == {name: args[name] for name in given}
            assert set(args) - set(given) == {
                "model_instance_kind", "model_instance_name", "model_instance_device_id",
            }  # fmt: skip

    with testing.load(Prepared, CONFIG) as model:
        model.execute([model.request({"X": np.zeros(1, np.float32)})])
    assert len(Prepared.calls) == 1


def test_another_method_of_the_name_preload_is_not_called() -> None:
    class Own(Doubler):
        def preload(self, path: str) -> None:
            raise AssertionError("it is not called")

    with testing.load(Own, CONFIG) as model:
        assert isinstance(model.model, Own)
