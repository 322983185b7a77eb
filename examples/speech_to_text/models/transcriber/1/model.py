"""Writes down a sound file word by word: features, the acoustic model, and its classes joined."""

import asyncio
import io
import json
import wave

import features
import numpy as np
from words import Words

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
CHUNK = 100  # frames in one request to the acoustic model: a second


class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*(self.transcribe(request) for request in requests))

    async def transcribe(self, request):
        sender = request.get_response_sender()
        try:
            async for word, start, end in self.words(request, sender):
                sender.send(response(word, start, end))
        except pb_utils.TritonModelException as error:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
        sender.send(flags=FINAL)

    async def words(self, request, sender):
        """Yield words as they are heard, until the client leaves."""
        (file,) = pb_utils.get_input_tensor_by_name(request, "audio").as_numpy()
        frames = features.frames(samples(file))
        heard = Words()
        for first in range(0, len(frames), CHUNK):
            if sender.is_cancelled():
                return
            scores = await self.scores(frames[first : first + CHUNK])
            for word in heard.add(scores.argmax(axis=1)):
                yield word
        if heard.word:
            yield heard.take()

    async def scores(self, frames):
        bls_request = pb_utils.InferenceRequest(
            model_name="acoustic",
            inputs=[pb_utils.Tensor("FRAMES", frames)],
            requested_output_names=["SCORES"],
        )
        bls_response = await bls_request.async_exec()
        if bls_response.has_error():
            raise pb_utils.TritonModelException(bls_response.error().message())
        return pb_utils.get_output_tensor_by_name(bls_response, "SCORES").as_numpy()


def samples(file):
    """Return the samples of a WAV file, between -1 and 1."""
    try:
        with wave.open(io.BytesIO(file)) as sound:
            shape = (sound.getnchannels(), sound.getsampwidth(), sound.getframerate())
            data = sound.readframes(sound.getnframes())
    except (wave.Error, EOFError) as error:
        raise pb_utils.TritonModelException(f"audio: not a WAV file: {error}") from error
    if shape != (1, 2, features.RATE) or len(data) < 2 * features.WINDOW:
        raise pb_utils.TritonModelException(
            "audio: expected 32 ms or more of 1 channel, 2 bytes, 16000 Hz, got"
            " {} channels, {} bytes, {} Hz".format(*shape)
        )
    return np.frombuffer(data, "<i2", len(data) // 2) / 32768  # a file may be cut off


def response(word, start, end):
    segment = {"start": round(start, 2), "end": round(end, 2), "text": word}
    texts = {"text": f"{word} ", "segments": json.dumps([segment])}
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor(name, np.array([text.encode()], np.object_))
            for name, text in texts.items()
        ]
    )
