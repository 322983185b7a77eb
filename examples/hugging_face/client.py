"""Classifies three texts in one request."""

import pbhost

TEXTS = ["The food is great", "This song is awful", "A play is lovely"]

with pbhost.Client("localhost:8001") as client:
    result = client.infer("sentiment", TEXT=[[text] for text in TEXTS])
for text, label, score in zip(TEXTS, result["LABEL"][:, 0], result["SCORE"][:, 0], strict=True):
    print(f"{text}: {label.decode()} {score:.1f}")
