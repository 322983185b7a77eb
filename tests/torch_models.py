"""Small networks that tests save and serve."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, ClassVar, Dict, List, Optional, Tuple  # noqa: UP035  (TorchScript reads these)

import numpy as np
import torch
from torch import Tensor, nn


class SumDiff(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        return a + b, a - b


class OfDict(nn.Module):
    def forward(self, given: Dict[str, Tensor]) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        return given["left"] + given["right"], given["left"] - given["right"]


class ToDict(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Dict[str, Tensor]:  # noqa: UP006
        return {"SUM": a + b, "DIFF": a - b}


class Named(nn.Module):
    def forward(self, given: Dict[str, Tensor]) -> Dict[str, Tensor]:  # noqa: UP006
        return {"SUM": given["u"] + given["v"], "DIFF": given["u"] - given["v"]}


class InPlace(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x)


class Hungry(nn.Module):
    """Returns the requested number of zeros."""

    def forward(self, size: Tensor) -> Tensor:
        return torch.zeros(int(size.item()))


class Bias(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Defaulted(nn.Module):
    def forward(self, x: Tensor, bias: Optional[Tensor] = None) -> Tensor:  # noqa: UP045
        return x + 1 if bias is None else x + bias


class Exclaim(nn.Module):
    def forward(self, t: List[str]) -> List[str]:  # noqa: UP006
        return [text + "!" for text in t]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class Typed(nn.Module):
    """Gives back all that it is given."""

    NAMES: ClassVar = {
        "BOOL": np.bool_,
        "UINT8": np.uint8,
        "INT8": np.int8,
        "INT16": np.int16,
        "INT32": np.int32,
        "INT64": np.int64,
        "FP16": np.float16,
        "FP32": np.float32,
        "FP64": np.float64,
        "BF16": None,
    }

    def forward(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        e: Tensor,
        f: Tensor,
        g: Tensor,
        h: Tensor,
        i: Tensor,
        j: Tensor,
    ) -> List[Tensor]:  # noqa: UP006
        return [a, b, c, d, e, f, g, h, i, j]


def script(folder: Path, model: Any) -> None:
    """Writes TorchScript."""
    path = folder / "1" / "model.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(model.eval()), path)


def export(folder: Path, model: Any, *args: Any, batches: bool = True) -> None:
    """Writes an exported program, whose tensors all have a variable first dimension."""
    path = folder / "1" / "model.pt2"
    path.parent.mkdir(parents=True, exist_ok=True)
    batch = torch.export.Dim("batch")
    shapes = torch.utils._pytree.tree_map(lambda each: {0: batch}, args) if batches else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model.eval(), args, dynamic_shapes=shapes)
        torch.export.save(program, path)
