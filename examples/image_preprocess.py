"""Client of `image_preprocess`: sends an image file and gets a network's input. Needs Pillow."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
from PIL import Image, ImageDraw


def draw(path: Path) -> None:
    """A sample file: a red disc on white."""
    image = Image.new("RGB", (640, 480), "white")
    ImageDraw.Draw(image).ellipse((220, 140, 420, 340), fill="red")
    image.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("image", nargs="*", type=Path, help="PNG or JPEG files")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        grpcclient.InferenceServerClient(arguments.url) as client,
    ):
        drawn = [Path(folder, "disc.png"), Path(folder, "disc.jpg")]
        for path in drawn:
            draw(path)
        for path in arguments.image or drawn:
            image = np.asarray(Image.open(path).convert("RGB"))
            tensor = grpcclient.InferInput("IMAGE", image.shape, "UINT8")
            tensor.set_data_from_numpy(image)
            pixels = client.infer("image_preprocess", [tensor]).as_numpy("PIXELS")
            centre = pixels[:, 112, 112].round(2)
            print(f"{path.name} {image.shape} -> {pixels.shape}, centre {centre}")


if __name__ == "__main__":
    main()
