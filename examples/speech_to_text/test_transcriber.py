"""Tests the pipeline in this process, without a server. Run train.py first."""

import io
import json
import wave

import numpy as np
import pytest
from tones import speak, wav

from pbhost import testing


@pytest.fixture(scope="module")
def transcriber():
    with (
        testing.load("models/acoustic") as acoustic,
        testing.load("models/transcriber", models={"acoustic": acoustic}) as transcriber,
    ):
        yield transcriber


def transcribe(transcriber, file):
    audio = np.array([file], np.object_)
    return list(transcriber.stream({"audio": audio}))


@pytest.mark.parametrize("text", ["a", "hello world", "zoo queue jumps over boxes"])
def test_words_are_heard_one_by_one(transcriber, text):
    heard = transcribe(transcriber, wav(speak(text, seed=7)))
    assert b"".join(part["text"][0] for part in heard).decode() == f"{text} "


def test_segments_say_when(transcriber):
    (part,) = transcribe(transcriber, wav(speak("now")))
    (segment,) = json.loads(part["segments"][0])
    assert segment["text"] == "now" and 0 <= segment["start"] < segment["end"] < 0.6


def test_other_files_are_refused(transcriber):
    with pytest.raises(Exception, match="audio: not a WAV file"):
        transcribe(transcriber, b"MP3")
    with io.BytesIO() as file:
        with wave.open(file, "wb") as sound:
            sound.setparams((1, 1, 16000, 0, "NONE", ""))
            sound.writeframes(bytes(16001))
        narrow = file.getvalue()
    with pytest.raises(Exception, match="got 1 channels, 1 bytes, 16000 Hz"):
        transcribe(transcriber, narrow)
    transcribe(transcriber, wav(speak("now"))[:-1])  # one that is cut off is heard to its end
