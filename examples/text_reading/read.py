"""Client of `text_reader` and `text_reader_bls`: draws a sign, or takes a file, and reads it."""

import argparse
import io
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SIGN = ("PLATFORM 9", "TRAIN TO YORK", "LEAVES AT 1045")


def written(line: str, scale: int) -> Image.Image:
    """A line of text in Pillow's bitmap font, enlarged."""
    picture = Image.new("L", (6 * len(line), 11))
    font = ImageFont.load_default_imagefont()
    ImageDraw.Draw(picture).text((0, 0), line, fill=255, font=font)
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.BOX)


def sign(lines: tuple[str, ...], seed: int = 0) -> bytes:
    """A JPEG file of light text on a dark board with a frame and noise."""
    random = np.random.default_rng(seed)
    board = np.full((60 + 60 * len(lines), 520), 40.0)
    board[8:14, 8:-8] = board[-14:-8, 8:-8] = board[8:-8, 8:14] = board[8:-8, -14:-8] = 150
    for index, line in enumerate(lines):
        ink = np.asarray(written(line, int(random.integers(3, 5))), float)
        top, left = 36 + 60 * index, int(random.integers(64, 90))
        board[top : top + ink.shape[0], left : left + ink.shape[1]] += 0.8 * ink
    board += random.normal(0, 6, board.shape)
    file = io.BytesIO()
    photo = Image.fromarray(board.clip(0, 255).astype(np.uint8))
    photo.filter(ImageFilter.GaussianBlur(0.8)).save(file, "jpeg", quality=85)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--image", type=Path, help="an image file instead of the drawn sign")
    arguments = parser.parse_args()
    data = arguments.image.read_bytes() if arguments.image else sign(SIGN)
    image = np.frombuffer(data, np.uint8)
    with grpcclient.InferenceServerClient(arguments.url) as client:
        for model in ("text_reader", "text_reader_bls"):
            tensor = grpcclient.InferInput("IMAGE", image.shape, "UINT8")
            result = client.infer(model, [tensor.set_data_from_numpy(image)])
            words = [word.decode() for word in result.as_numpy("TEXT")]
            print(f"{model}: {' '.join(words) or 'nothing is written there'}")


if __name__ == "__main__":
    main()
