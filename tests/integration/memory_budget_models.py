"""Models whose processes use a known amount of memory, and budgets for a number of them."""

from __future__ import annotations

from tests.conftest import RunningHost
from tests.integration.control_models import CONFIG, MODEL
from tests.integration.on_demand_models import metric

MIB = 1 << 20

WEIGHTS = 40
"""Mebibytes that `large` models take; a process without them takes less than half of that."""

MORE = '''
    def ask(self, text):
        """The response of another model to a command."""
        model, _, command = text.partition(" ")
        array = np.array([command.encode()], dtype=np.object_)
        request = pb_utils.InferenceRequest(
            model_name=model,
            requested_output_names=["ANSWER"],
            inputs=[pb_utils.Tensor("COMMAND", array)],
        )
        response = request.exec()
        if response.has_error():
            return response.error().message()
        return pb_utils.get_output_tensor_by_name(response, "ANSWER").as_numpy()[0].decode()

    def grow(self, mebibytes):
        self.more = np.ones(int(mebibytes) << 20, np.uint8)
        return "grown"

    def wait(self, path):
        print("waiting for", path, flush=True)
        until(lambda: os.path.exists(path), path)
        return "waited"

    def wait_and_ask(self, text):
        path, _, question = text.partition(" ")
        self.wait(path)
        return self.ask(question)

    def hold(self, path):
        self.gate = path
        return "holds"

    def finalize(self):
        if getattr(self, "gate", ""):
            print("NAME finalizes", flush=True)
            until(lambda: os.path.exists(self.gate), self.gate)

    def hello(self, others):
        return f"hello {others} NAME"
'''


def large(name: str, mebibytes: int = WEIGHTS) -> str:
    """A model whose `initialize` takes this much memory, and which can ask other models."""
    body = f"""
        self.args = args
        self.weights = np.ones({mebibytes} << 20, np.uint8)
"""
    model = MODEL.replace("\n        self.args = args\n", body) + MORE
    return model.replace("NAME", name)


def budget(models: int) -> str:
    """The flag for a budget in which this many large models fit, and not one more."""
    return f"--memory-budget={models * (WEIGHTS + 15) << 20}"


def pipeline(*steps: str) -> str:
    """The configuration of an ensemble that asks these models one after the other."""
    tensors = ["COMMAND", *(f"between_{number}" for number in range(1, len(steps))), "ANSWER"]
    parts = [
        f'{{ model_name: "{step}" model_version: -1'
        f' input_map {{ key: "COMMAND" value: "{given}" }}'
        f' output_map {{ key: "ANSWER" value: "{made}" }} }}'
        for step, given, made in zip(steps, tensors, tensors[1:], strict=False)
    ]
    return (
        CONFIG.replace('backend: "python"', 'platform: "ensemble"')
        + f"ensemble_scheduling {{ step [ {', '.join(parts)} ] }}"
    )


def evictions(host: RunningHost, model: str) -> float:
    """How often a model was unloaded to make room."""
    return metric(host, "pbhost_model_evictions_total", model=model)


def memory(host: RunningHost, model: str = "") -> float:
    """The bytes of a model, or of all models, when they were measured last."""
    labels = {"model": model} if model else {}
    return metric(host, "pbhost_model_memory_bytes", device="host", **labels)
