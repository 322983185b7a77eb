"""The description of a plan as plain data: tensors, layouts and optimization profiles."""

from typing import List, NamedTuple, Sequence, Tuple

from pb_utils._datatypes import CONFIG_CODES, STORAGE
from stub.backends.contract import ModelTensor

STORAGE_DTYPES = {name: STORAGE[code] for name, code in CONFIG_CODES.items()}
"""The numpy type of each data type of a configuration; 16-bit integers for BF16."""

Extent = Tuple[int, ...]
"""The shape of an input, or the values of a shape tensor: what optimization profiles limit."""


class ProfileRange(NamedTuple):
    """The limits that an optimization profile sets for one input, and its optimum."""

    min: Extent
    opt: Extent
    max: Extent

    def contains(self, extent: Sequence[int]) -> bool:
        """Returns whether every size lies within the limits."""
        return len(extent) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, extent, self.max)
        )


class Layout(NamedTuple):
    """The memory layout of elements: vectors of `components`, along dimension `vector_axis`.

    The last vector is padded. `linear`: the layout of an ordinary array.
    """

    linear: bool = True
    vector_axis: int = -1
    components: int = 1
    description: str = "linear"

    def elements(self, shape: Sequence[int]) -> int:
        """Returns the number of elements in memory, with padding, for a tensor of this shape."""
        count = 1
        for index, size in enumerate(shape):
            if index == self.vector_axis:
                size = -(-size // self.components) * self.components
            count *= size
        return count


class PlanTensor(NamedTuple):
    """One input or output. `shape` is the engine's, with -1 for dynamic dimensions.

    `is_shape_tensor`: the engine computes shapes from its values, or outputs a shape in them.
    `on_host`: the engine reads or writes it in the CPU's memory. `ranges`: the limits of each
    profile, for an input.
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
        """Returns the bytes of memory that the tensor needs with this shape."""
        return self.layout.elements(shape) * STORAGE_DTYPES[self.data_type].itemsize


class Plan(NamedTuple):
    """A whole engine.

    `implicit_max_batch`: the maximum batch size if the shapes lack the batch dimension, as in
    engines of TensorRT 9 and earlier; else 0.
    """

    tensors: Tuple[PlanTensor, ...]
    profiles: int = 1
    implicit_max_batch: int = 0

    @property
    def inputs(self) -> List[PlanTensor]:
        """The inputs in the engine's order."""
        return [tensor for tensor in self.tensors if tensor.is_input]

    @property
    def outputs(self) -> List[PlanTensor]:
        """The outputs in the engine's order."""
        return [tensor for tensor in self.tensors if not tensor.is_input]

    def max_batch(self, profiles: Sequence[int]) -> int:
        """Returns the largest batch size of these profiles; 0 without a batch dimension.

        An engine has a batch dimension if the first dimension of all tensors is dynamic, apart from
        shape tensors.
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
    """Returns the tensor as configurations describe it, with an implicit batch dimension."""
    shape = list(tensor.shape)
    if plan.implicit_max_batch:
        shape.insert(0, -1)
    return ModelTensor(tensor.name, tensor.data_type, shape)
