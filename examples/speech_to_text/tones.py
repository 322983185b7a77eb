"""A made-up speech: each letter is a pair of tones. Writes texts as sound files."""

import io
import wave

import numpy as np

RATE = 16000
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LOW, HIGH = (400, 560, 720, 880, 1040), (1400, 1700, 2000, 2300, 2600, 2900)
TONE, PAUSE, SPACE = 0.1, 0.06, 0.12  # seconds


def tone(letter: str, random: np.random.Generator) -> np.ndarray:
    """Returns the samples of a letter, spoken at a random pitch and loudness."""
    row, column = divmod(LETTERS.index(letter), len(HIGH))
    times = np.arange(int(TONE * RATE)) / RATE
    pitch, loudness = random.uniform(0.99, 1.01), random.uniform(0.1, 0.4)
    angles = 2 * np.pi * pitch * times
    return loudness * (np.sin(LOW[row] * angles) + np.sin(HIGH[column] * angles))


def speak(text: str, seed: int = 0) -> np.ndarray:
    """Returns the samples of a text, with noise."""
    random = np.random.default_rng(seed)
    parts = [np.zeros(int(PAUSE * RATE))]
    for letter in text:
        parts.append(np.zeros(int(SPACE * RATE)) if letter == " " else tone(letter, random))
        parts.append(np.zeros(int(PAUSE * RATE)))
    samples = np.concatenate(parts)
    return samples + random.normal(0, 0.01, len(samples))


def wav(samples: np.ndarray) -> bytes:
    """Returns the samples as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        sound.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()
