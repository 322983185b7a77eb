"""Writes a model repository with a vision transformer of Hugging Face, in two forms.

The weights are random with a fixed seed, so nothing is downloaded. `--layers 12` is the depth of
ViT-Base; more layers take longer to write.
"""

import argparse
import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel

MODELS = Path(__file__).parent / "models"


class LastHidden(nn.Module):
    """The network with one input and one output, for the export to ONNX."""

    def __init__(self, network: ViTModel) -> None:
        super().__init__()
        self.network = network

    def forward(self, PIXELS: Tensor) -> Tensor:
        return self.network(pixel_values=PIXELS).last_hidden_state


def write(repository: Path, layers: int) -> None:
    """Writes the weights for the Python model, and an ONNX graph with the same weights."""
    shutil.copytree(
        MODELS, repository, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("onnx", "ensemble"):  # the version folder of the ensemble stays empty
        (repository / f"vit_{name}" / "1").mkdir(exist_ok=True)
    torch.manual_seed(2024)
    network = ViTModel(ViTConfig(num_hidden_layers=layers), add_pooling_layer=False).eval()
    network.save_pretrained(repository / "vit_python" / "1" / "weights")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there are newer formats
        torch.onnx.export(
            LastHidden(network),
            (torch.zeros(1, 3, 224, 224),),
            str(repository / "vit_onnx" / "1" / "model.onnx"),
            dynamo=False,
            opset_version=17,
            input_names=["PIXELS"],
            output_names=["HIDDEN"],
            dynamic_axes={"PIXELS": {0: "batch"}, "HIDDEN": {0: "batch"}},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    write(arguments.repository, arguments.layers)
    made = ", ".join(sorted(each.name for each in arguments.repository.glob("vit_*")))
    print(f"{arguments.repository} has {made}")


if __name__ == "__main__":
    main()
