"""Writes a model repository that generates pictures from text by diffusion.

The networks are constructed here, not trained. They know only a few words and the pictures of
these, so the denoiser can compute the noise exactly.
"""

import argparse
import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

MODELS = Path(__file__).parent / "models"
COLOURS = {
    "red": (1.0, -1.0, -1.0),
    "green": (-1.0, 1.0, -1.0),
    "blue": (-1.0, -1.0, 1.0),
    "yellow": (1.0, 1.0, -1.0),
}
SHAPES = ("disc", "square", "stripes")
WORDS = ("", *COLOURS, *SHAPES)
"""The vocabulary; all other words have no meaning."""
SIZE = 16
"""Rows and columns of the latent picture."""


class Encoder(nn.Module):
    """Encodes words, as numbers of shape (1, words), to a colour and a shape: (1, 6)."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(len(WORDS), 6)
        for row, word in enumerate(WORDS):
            if word in COLOURS:
                table[row, :3] = torch.tensor(COLOURS[word])
            elif word in SHAPES:
                table[row, 3 + SHAPES.index(word)] = 1
        self.meaning = nn.Embedding.from_pretrained(table)

    def forward(self, TOKENS: Tensor) -> Tensor:
        return self.meaning(TOKENS).sum(1)


class Denoiser(nn.Module):
    """Computes the noise in a noisy picture of what the words mean.

    NOISY is (1, 3, 16, 16), MEANING (1, 6), and LEVEL (1) the share of the picture in NOISY.
    """

    def __init__(self) -> None:
        super().__init__()
        y, x = torch.meshgrid(*[torch.linspace(-1, 1, SIZE)] * 2, indexing="ij")
        shapes = [x**2 + y**2 < 0.5, torch.maximum(x.abs(), y.abs()) < 0.6, torch.sin(12 * x) > 0]
        self.register_buffer("shapes", torch.stack(shapes).float())

    def forward(self, NOISY: Tensor, MEANING: Tensor, LEVEL: Tensor) -> Tensor:
        where = torch.einsum("ns,shw->nhw", MEANING[:, 3:], self.shapes).clamp(0, 1)[:, None]
        meant = where * MEANING[:, :3, None, None] + where - 1  # the background is black
        level = LEVEL.reshape(-1, 1, 1, 1)
        return (NOISY - level.sqrt() * meant.clamp(-1, 1)) / (1 - level).sqrt()


class Decoder(nn.Module):
    """Converts a latent picture (1, 3, 16, 16) to an image (64, 64, 3), values from 0 to 255."""

    def forward(self, LATENT: Tensor) -> Tensor:
        large = nn.functional.interpolate(LATENT, scale_factor=4.0, mode="nearest")
        return ((large[0].permute(1, 2, 0) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def write(repository: Path) -> None:
    """Writes all models; the Python model is copied."""
    shutil.copytree(
        MODELS, repository, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    folders = {name: repository / f"picture_{name}" / "1" for name in ("encoder", "decoder")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there are newer formats
        for name, network, example, taken, given, sizes in (
            ("encoder", Encoder(), torch.zeros(1, 3, dtype=torch.int64), "TOKENS", "MEANING", [1]),
            ("decoder", Decoder(), torch.zeros(1, 3, SIZE, SIZE), "LATENT", "IMAGE", []),
        ):
            folders[name].mkdir(exist_ok=True)
            torch.onnx.export(
                network.eval(),
                (example,),
                str(folders[name] / "model.onnx"),
                dynamo=False,
                opset_version=17,
                input_names=[taken],
                output_names=[given],
                dynamic_axes={taken: {axis: f"size{axis}" for axis in sizes}},
            )
        denoiser = repository / "picture_denoiser" / "1"
        denoiser.mkdir(exist_ok=True)
        torch.jit.save(torch.jit.script(Denoiser().eval()), denoiser / "model.pt")
    (repository / "picture_maker" / "1" / "words.txt").write_text("\n".join(WORDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    repository = parser.parse_args().repository
    write(repository)
    made = ", ".join(sorted(each.name for each in repository.glob("picture_*")))
    print(f"{repository} has {made}")


if __name__ == "__main__":
    main()
