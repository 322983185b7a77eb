"""A page that reads digits: a Gradio client of the pipeline `digits`."""

import argparse
import os

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio
import numpy as np
import tritonclient.http as httpclient
from PIL import Image, ImageDraw


class Reader:
    """Asks the pipeline. `url` is the address of the HTTP port."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model

    def read(self, image: Image.Image | None) -> tuple[str, Image.Image]:
        """Returns the digits in an image, and the image with a box around each."""
        if image is None:
            raise gradio.Error("Choose an image first.")
        pixels = np.asarray(image.convert("L"))
        tensor = httpclient.InferInput("IMAGE", pixels.shape, "UINT8")
        try:
            with httpclient.InferenceServerClient(self.url) as client:
                result = client.infer(self.model, [tensor.set_data_from_numpy(pixels)])
        except (httpclient.InferenceServerException, OSError) as error:
            raise gradio.Error(f"{self.model} at {self.url}: {error}") from error
        marked = image.convert("RGB")
        drawing = ImageDraw.Draw(marked)
        for top, bottom, left, right in result.as_numpy("BOXES").tolist():
            drawing.rectangle((left, top, right, bottom), outline=(220, 60, 60), width=3)
        return b"".join(result.as_numpy("DIGITS").tolist()).decode(), marked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8000", help="of the server's HTTP port")
    parser.add_argument("--model", default="digits", choices=["digits", "digits_bls"])
    parser.add_argument("--port", type=int, help="of this page; by default, 7860 or the next free")
    arguments = parser.parse_args()
    reader = Reader(arguments.url, arguments.model)
    page = gradio.Interface(
        reader.read,
        gradio.Image(type="pil", label="White digits on black"),
        [gradio.Textbox(label="Digits"), gradio.Image(type="pil", label="Where they are")],
        title="Digits",
        api_name="read",
        flagging_mode="never",
    )
    page.launch(server_name="127.0.0.1", server_port=arguments.port)


if __name__ == "__main__":
    main()
