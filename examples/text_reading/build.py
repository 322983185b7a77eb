"""Writes a model repository that reads text: five models in three formats, and two pipelines.

Both networks are constructed here, not trained: the weights of an edge detector and of a comparison
with letters are known.
"""

import argparse
import shutil
import warnings
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

MODELS = Path(__file__).parent / "models"
ALPHABET = "ABCDEFGHIJKLMNOPRSTUVWXYZ0123456789"
"""All letters except Q, the only one that goes below the line. Class 0 is "no letter"."""
HEIGHT = 24
"""Height of a cropped word in rows, the same as in text_crop."""


class Detector(nn.Module):
    """Detects text, where grey values change often: (1, 1, H, W) to (1, 1, H / 4, W / 4).

    The output is the probability that a block of 4 by 4 pixels is part of a line of text. One or
    two edges, such as those of a frame, are not text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.Conv2d(1, 2, (3, 5), padding=(1, 2))
        step = torch.tensor([[-1.0, 0.0, 0.0, 0.0, 1.0]]).repeat(3, 1) / 3
        self.edges.weight.data = torch.stack([step, -step])[:, None]
        self.edges.bias.data = torch.full((2,), -0.4)  # noise and shading are weaker than this
        self.count = nn.Conv2d(2, 1, (8, 36), stride=4, padding=(2, 16), bias=False)
        self.count.weight.data = torch.full((1, 2, 8, 36), 1 / (8 * 2.4))  # per row of pixels
        # Extends to the ends of each line.
        self.reach = nn.MaxPool2d((5, 13), stride=1, padding=(2, 6))

    def forward(self, PICTURE: Tensor) -> Tensor:
        edges = self.count(torch.relu(self.edges(PICTURE)))
        return torch.sigmoid(8 * (self.reach(edges) - 1.3))


class Recogniser(nn.Module):
    """Compares every letter with every position of a word: (N, 1, HEIGHT, W) to (N, T, classes).

    The output has log probabilities. The agreement of a letter is 1 if all pixels are equal; "no
    letter" has a fixed agreement just below that.
    """

    def __init__(self, enough: float = 0.65) -> None:
        super().__init__()
        glyphs = [glyph(character) for character in ALPHABET]
        width = max(each.shape[1] for each in glyphs)
        self.compare = nn.Conv2d(1, len(glyphs), (HEIGHT, width), bias=False)
        weights = torch.zeros(len(glyphs), 1, HEIGHT, width)
        for place, each in enumerate(glyphs):
            weights[place, 0, :, : each.shape[1]] = (2 * each - 1) / each.numel()
        self.compare.weight.data = weights
        self.width, self.enough = width, enough

    def forward(self, CROPS: Tensor) -> Tensor:
        clear = torch.tanh(12 * (CROPS - 0.5))  # round blurred edges to black or white
        room = nn.functional.pad(clear, (2, self.width), value=-1.0)
        agreement = self.compare(room).squeeze(2)
        none = torch.full_like(agreement[:, :1], self.enough)
        return torch.log_softmax(40 * torch.cat([none, agreement], 1), 1).transpose(1, 2)


def glyph(character: str) -> Tensor:
    """A letter of the font as an array of crop height; ink is 1."""
    cell = Image.new("L", (6, 11))
    ImageDraw.Draw(cell).text((0, 0), character, fill=255, font=ImageFont.load_default_imagefont())
    _, top, _, bottom = cell.getbbox()
    width = round(6 * HEIGHT / (bottom - top))
    cell = cell.resize((width, HEIGHT), Image.Resampling.BOX, box=(0, top, 6, bottom))
    return torch.tensor(list(cell.tobytes())).reshape(HEIGHT, width) / 255


def write(repository: Path) -> None:
    """Writes all models; the Python models are copied."""
    shutil.copytree(
        MODELS, repository, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    folders = [repository / f"text_{name}" / "1" for name in ("detector", "recogniser", "reader")]
    for folder in folders:  # the version folder of the ensemble stays empty
        folder.mkdir(exist_ok=True)
    detector, recogniser, _ = folders
    sizes = {2: "height", 3: "width"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there are newer formats
        torch.onnx.export(
            Detector().eval(),
            (torch.zeros(1, 1, 64, 64),),
            str(detector / "model.onnx"),
            dynamo=False,
            opset_version=17,
            input_names=["PICTURE"],
            output_names=["HEAT"],
            dynamic_axes={"PICTURE": sizes, "HEAT": sizes},
        )
        torch.jit.save(torch.jit.script(Recogniser().eval()), recogniser / "model.pt")
    classes = repository / "text_decode" / "1" / "alphabet.txt"
    classes.write_text(ALPHABET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    repository = parser.parse_args().repository
    write(repository)
    print(f"{repository} has {', '.join(sorted(each.name for each in repository.glob('text_*')))}")


if __name__ == "__main__":
    main()
