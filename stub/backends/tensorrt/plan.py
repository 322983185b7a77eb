"""What a plan says of itself, as plain data: its tensors, their layouts, its profiles."""

from typing import List, NamedTuple, Sequence, Tuple

from pb_utils._datatypes import BF16, STORAGE, TRITON_STRING_TO_NUMPY
from stub.backends.contract import ModelTensor

STORAGE_DTYPES = {name: STORAGE[code] for code, name in enumerate(TRITON_STRING_TO_NUMPY, 1)}
"""Data types of numpy, by those of a configuration; BF16 is 16-bit integers."""
STORAGE_DTYPES["TYPE_BF16"] = STORAGE[BF16]

Extent = Tuple[int, ...]
"""The shape of an input; of a shape tensor, its values. Both are what profiles limit."""


class ProfileRange(NamedTuple):
    """What an optimisation profile takes of one input, and what it is best for."""

    min: Extent
    opt: Extent
    max: Extent

    def contains(self, extent: Sequence[int]) -> bool:
        """Whether all of it is between the ends."""
        return len(extent) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, extent, self.max)
        )


class Layout(NamedTuple):
    """How elements lie in memory: in vectors of `components`, along the dimension `vector_axis`.

    The last vector is filled up. `linear`: as in an array, with nothing else to know.
    """

    linear: bool = True
    vector_axis: int = -1
    components: int = 1
    description: str = "linear"

    def elements(self, shape: Sequence[int]) -> int:
        """Elements that there is memory for, of a tensor of this shape."""
        count = 1
        for index, size in enumerate(shape):
            if index == self.vector_axis:
                size = -(-size // self.components) * self.components
            count *= size
        return count


class PlanTensor(NamedTuple):
    """One input or output. `shape` is the engine's, with -1 for what is dynamic.

    `is_shape_tensor`: the engine computes shapes from its values, or it is such a value. `on_host`:
    it is read or written in the CPU's memory. `ranges`: for an input, one for each profile.
    """

    name: str
    is_input: bool
    data_type: str
    shape: Extent
    ranges: Tuple[ProfileRange, ...] = ()
    is_shape_tensor: bool = False
    on_host: bool = False
    layout: Layout = Layout()

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of memory that it takes with this shape."""
        return self.layout.elements(shape) * STORAGE_DTYPES[self.data_type].itemsize


class Plan(NamedTuple):
    """A whole engine. `implicit_max_batch`: its largest batch, if shapes do not have that
    dimension; else 0.

    Engines of that kind are those of TensorRT 9 and before.
    """

    tensors: Tuple[PlanTensor, ...]
    profiles: int = 1
    implicit_max_batch: int = 0

    @property
    def inputs(self) -> List[PlanTensor]:
        """In the engine's order."""
        return [tensor for tensor in self.tensors if tensor.is_input]

    @property
    def outputs(self) -> List[PlanTensor]:
        """In the engine's order."""
        return [tensor for tensor in self.tensors if not tensor.is_input]

    def max_batch(self, profiles: Sequence[int]) -> int:
        """The most that one of these profiles takes; 0 if the engine has no batch dimension.

        It has one if the first dimension of all tensors but shape tensors is dynamic.
        """
        if self.implicit_max_batch:
            return self.implicit_max_batch
        batched = [tensor for tensor in self.tensors if not tensor.is_shape_tensor]
        if not all(tensor.shape[:1] == (-1,) for tensor in batched):
            return 0
        inputs = [tensor for tensor in batched if tensor.is_input]
        if not inputs:
            return 0
        return max(min(tensor.ranges[profile].max[0] for tensor in inputs) for profile in profiles)


def model_tensor(plan: Plan, tensor: PlanTensor) -> ModelTensor:
    """The tensor as configurations see it: an implicit batch dimension is one as well."""
    shape = list(tensor.shape)
    if plan.implicit_max_batch:
        shape.insert(0, -1)
    return ModelTensor(tensor.name, tensor.data_type, shape)
