"""Words out of classes of frames."""

from collections import Counter

import features

LETTERS = " abcdefghijklmnopqrstuvwxyz"  # class 0 is silence
LEAST = 3  # frames of a letter; fewer are noise
SILENCE = 12  # frames between two words


class Words:
    """Joins frames to letters, and letters to words, as they arrive."""

    def __init__(self):
        self.frame, self.silence = 0, 0
        self.letter = Counter()
        self.word, self.start, self.end = "", 0, 0

    def add(self, classes):
        """Yield each word that has ended: text, start and end in seconds."""
        for number in classes:
            self.frame += 1
            if number:
                self.letter[number] += 1
                self.silence = 0
                continue
            self.silence += 1
            self.end_letter()
            if self.word and self.silence == SILENCE:
                yield self.take()

    def end_letter(self):
        """Add the class that most frames have had since the last silence."""
        count = self.letter.total()
        if count >= LEAST:
            self.end = self.frame - 1
            self.start = self.start if self.word else self.end - count
            self.word += LETTERS[self.letter.most_common(1)[0][0]]
        self.letter.clear()

    def take(self):
        """Return the word that is being spelled, and begin another one."""
        self.end_letter()
        word, self.word = self.word, ""
        return word, self.start * features.SECONDS, self.end * features.SECONDS
