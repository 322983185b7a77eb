"""Client of `digits` and `digits_bls`: draws digits of several sizes and has them recognised."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient

LIT = {  # segments: top, middle, bottom, upper left, upper right, lower left, lower right
    "0": "1011111", "1": "0000101", "2": "1110110", "3": "1110101", "4": "0101101",
    "5": "1111001", "6": "1111011", "7": "1000101", "8": "1111111", "9": "1111101",
}  # fmt: skip


def draw(digit: str, height: int) -> np.ndarray:
    """Draws one digit with seven segments, white on black."""
    width, thick, half = height * 5 // 8, height // 8, height // 2
    places = [
        (slice(0, thick), slice(0, width)),
        (slice(half - thick // 2, half + thick // 2), slice(0, width)),
        (slice(height - thick, height), slice(0, width)),
        (slice(0, half), slice(0, thick)),
        (slice(0, half), slice(width - thick, width)),
        (slice(half, height), slice(0, thick)),
        (slice(half, height), slice(width - thick, width)),
    ]
    picture = np.zeros((height, width), np.uint8)
    for place, lit in zip(places, LIT[digit], strict=True):
        picture[place] = 255 * int(lit)
    return picture


def scene(digits: str) -> np.ndarray:
    """An image with 480 rows that shows all digits, in different sizes and positions."""
    random = np.random.default_rng(len(digits))
    image = np.zeros((480, 40 + 180 * len(digits)), np.uint8)
    for index, digit in enumerate(digits):
        picture = draw(digit, 8 * int(random.integers(6, 30)))
        top = int(random.integers(10, 470 - picture.shape[0]))
        left = 40 + 180 * index
        image[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    noise = random.integers(0, 100, image.shape, dtype=np.uint8)
    return np.where(image > 0, 255 - noise, noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="digits", choices=["digits", "digits_bls"])
    parser.add_argument("--save", metavar="FILE", help="write an image of the digits; ask nothing")
    parser.add_argument("digits", nargs="*", default=["31415926", "8070"])
    arguments = parser.parse_args()
    if arguments.save:
        from PIL import Image

        Image.fromarray(scene("".join(arguments.digits))).save(arguments.save)
        return
    with grpcclient.InferenceServerClient(arguments.url) as client:
        for digits in arguments.digits:
            image = scene(digits)
            tensor = grpcclient.InferInput("IMAGE", image.shape, "UINT8")
            result = client.infer(arguments.model, [tensor.set_data_from_numpy(image)])
            read = b"".join(result.as_numpy("DIGITS")).decode()
            boxes = result.as_numpy("BOXES")
            print(f"{arguments.model}: {digits} drawn in {image.shape}, {len(boxes)} found: {read}")


if __name__ == "__main__":
    main()
