"""Speaks a text, and has it written down: over OpenAI's route, and over gRPC word by word."""

from openai import OpenAI
from tones import speak, wav

import pbhost

file = wav(speak("the train leaves at ten"))

with OpenAI(base_url="http://localhost:8000/v1", api_key="any") as client:
    answer = client.audio.transcriptions.create(model="transcriber", file=("speech.wav", file))
    print(answer.text)
    subtitles = client.audio.transcriptions.create(
        model="transcriber", file=("speech.wav", file), response_format="srt"
    )
    print(subtitles.split("\n\n")[1])

with pbhost.Client("localhost:8001") as client:
    print([part["text"][0].decode() for part in client.stream("transcriber", audio=file)])
