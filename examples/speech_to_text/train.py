"""Fits the acoustic model to spoken letters, and writes its weights into the model's folder."""

import sys
from pathlib import Path

import numpy as np
from tones import LETTERS, PAUSE, RATE, TONE, speak

sys.path.append("models/transcriber/1")  # the features in training are those in the pipeline
from features import STEP, WINDOW, frames

inputs, classes = [], []
for seed in range(20):
    for number, letter in enumerate(LETTERS, 1):
        inputs.append(frames(speak(letter, seed=100 * seed + number)))
        middles = (np.arange(len(inputs[-1])) * STEP + WINDOW / 2) / RATE
        spoken = (middles > PAUSE) & (middles < PAUSE + TONE)
        classes.append(np.where(spoken, number, 0))  # class 0 is silence

x, wanted = np.concatenate(inputs), np.eye(len(LETTERS) + 1)[np.concatenate(classes)]
x = np.column_stack([x, np.ones(len(x))])
weights = np.linalg.solve(x.T @ x + np.eye(x.shape[1]), x.T @ wanted).astype(np.float32)
np.savez(Path("models/acoustic/1/weights.npz"), matrix=weights[:-1], bias=weights[-1])
right = (x @ weights).argmax(axis=1) == wanted.argmax(axis=1)
print(f"{len(x)} frames, {right.mean():.0%} of them right")
