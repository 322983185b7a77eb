"""Answers from a prompt, word by word: its sentence that is most like the question.

A language model goes here. This one takes the last line of the prompt for the question.
"""

import asyncio
import re

import numpy as np

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*(self.write(request) for request in requests))

    async def write(self, request):
        sender = request.get_response_sender()
        (prompt,) = pb_utils.get_input_tensor_by_name(request, "prompt").as_numpy()
        for word in answer(prompt.decode()).split():
            if sender.is_cancelled():
                break
            piece = np.array([f"{word} ".encode()], np.object_)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text", piece)]))
            await asyncio.sleep(0)  # a network would compute here
        sender.send(flags=FINAL)


def answer(prompt):
    *passages, question = prompt.splitlines()
    sentences = [part for passage in passages for part in re.split(r"(?<=\.) ", passage)]
    return max(sentences, key=lambda sentence: len(pieces(sentence) & pieces(question)))


def pieces(text):
    """Return all pieces of three letters of the words of a text, and the shorter ends."""
    return {word[i : i + 3] for word in re.findall(r"\w+", text.lower()) for i in range(len(word))}
