"""Asks for the kinds of three flowers, with the names that belong to the classes."""

import pbhost

FLOWERS = [[5.1, 3.5, 1.4, 0.2], [6.0, 2.7, 4.5, 1.5], [6.7, 3.0, 5.6, 2.3]]

with pbhost.Client("localhost:8001") as client:
    answers = client.infer("flowers", FLOWER=FLOWERS, classes={"KIND": 1})["KIND"][:, 0]
print(", ".join(answer.decode().split(":")[2] for answer in answers))
