"""Asks for the kinds of two flowers."""

import pbhost

flowers = [[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3]]
with pbhost.Client("localhost:8001") as client:
    result = client.infer("iris", LENGTHS=flowers)
kinds = [kind.decode() for kind in result["KIND"][:, 0]]
print(f"version {result.model_version}: {', '.join(kinds)}")
