"""Serves TensorRT engines; each is built for one kind of GPU."""

from typing import Any, Dict, List, Mapping

import pb_utils
from stub.backends.batch import Array, restore_scalars
from stub.backends.framework_model import FrameworkModel, import_library
from stub.backends.model_contract import ModelContract
from stub.backends.model_settings import Placement, Settings, model_path, parse_config
from stub.backends.tensorrt.tensorrt_plan import (
    check_config,
    complete_config,
    graph_specs,
    instance_group_of,
    profiles_of_group,
)
from stub.user_model import ModelFailure


class TritonPythonModel(FrameworkModel):
    """One engine."""

    @classmethod
    def auto_complete_config(cls, config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """Completes the configuration with the plan's tensors; needs one of the model's GPUs."""
        given = config.as_dict()
        model = given["name"]
        groups = [each for each in given.get("instance_group", ()) if each.get("gpus")]
        group = groups[0] if groups else {}
        args = {"model_instance_name": model, "model_instance_kind": "GPU"}
        args["model_instance_device_id"] = str(group.get("gpus", [0])[0])
        opened, plan = _open_plan(given, Placement(args), group, cls.backend_config)
        complete_config(given, plan, list(range(plan.profiles)))
        del opened
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Opens the plan, checks the configuration against it, and records graphs."""
        config, placement = parse_config(args), Placement(args)
        self._contract = ModelContract(config)
        group = instance_group_of(config, placement.instance)
        opened, plan = _open_plan(config, placement, group, self.backend_config)
        profiles = profiles_of_group(self._contract.model, group, plan)
        check_config(self._contract, config.get("max_batch_size", 0), plan, profiles)
        graphs = graph_specs(config, plan, profiles)
        self._scalars = [
            each.name for each in plan.inputs if not each.shape and not plan.implicit_max_batch
        ]
        from stub.backends.tensorrt.runner import Runner

        self._runner = Runner(opened, plan, profiles, graphs)

    def _run(self, inputs: Dict[str, Array], wanted: List[str]) -> Mapping[str, Array]:
        restore_scalars(inputs, self._scalars)
        return self._runner.run(inputs, wanted)

    def finalize(self) -> None:
        """Deletes the engine before the interpreter exits."""
        del self._runner


def _open_plan(
    config: Mapping[str, Any],
    placement: Placement,
    group: Mapping[str, Any],
    backend_config: Mapping[str, str],
) -> Any:
    """Returns the opened plan and its description. Raises ModelFailure."""
    model = config["name"]
    torch, _ = (
        import_library(model, "tensorrt", package, package, "pbhost[tensorrt]")
        for package in ("torch", "tensorrt")
    )
    if not placement.on_gpu:
        raise ModelFailure(
            f"model '{model}' cannot be loaded: its instance '{placement.instance}' is to run on"
            f" KIND_{placement.kind}, and TensorRT runs on GPUs alone; configure KIND_GPU, on a"
            " machine that has one"
        )
    advice = "TensorRT needs one, and a torch that is built for the machine's CUDA"
    placement.check_gpu(model, torch, advice)
    from stub.backends.tensorrt import library

    torch.cuda.set_device(placement.device)
    capability = placement.capability(torch)
    path = model_path(config, pb_utils.get_model_dir(), capability)
    settings = Settings(model, backend_config)
    opened = library.open_plan(model, path, settings, group, capability)
    return opened, library.describe(model, opened.engine)
