"""Runs an engine on a GPU: contexts, memory, one stream, and recorded graphs.

PyTorch provides memory, streams and CUDA graphs, because pbhost uses PyTorch for GPUs already. All
memory is handled as bytes.
"""

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import tensorrt
import torch

import pb_utils
from pb_utils._storage import address_of, array_at
from stub.backends.batch import MIN_BYTES, Array, InvalidInput, RawTensor, allocate_output
from stub.backends.tensorrt.library import OpenedPlan
from stub.backends.tensorrt.tensorrt_plan import (
    STORAGE_DTYPES,
    Extent,
    GraphSpec,
    Plan,
    PlanTensor,
    choose_graph,
    choose_profile,
)

Value = Union[Array, RawTensor]


class Runner:
    """One context for each profile and for each graph; all share their working memory."""

    def __init__(
        self, opened: OpenedPlan, plan: Plan, profiles: Sequence[int], graphs: Sequence[GraphSpec]
    ) -> None:
        self._plan = plan
        self._profiles = profiles
        self._stream = torch.cuda.Stream()
        self._has_non_linear_inputs = any(not tensor.layout.linear for tensor in plan.inputs)
        with torch.cuda.stream(self._stream):
            self._working_memory = _allocate_working_memory(opened.engine)
            self._contexts = {each: self._make_context(opened, each) for each in profiles}
            self._recorded_graphs: List[_RecordedGraph] = []
            for graph in graphs:
                context = self._make_context(opened, graph.profile)
                recorded = context.record_graph(graph)
                if recorded is not None:
                    self._recorded_graphs.append(recorded)

    def run(self, inputs: Mapping[str, Value], wanted: Sequence[str]) -> Dict[str, Value]:
        """Returns the wanted outputs. Raises InvalidInput and TritonModelException."""
        extents = {each.name: _extent(each, inputs[each.name]) for each in self._plan.inputs}
        recorded = self._find_recorded_graph(extents)
        with torch.cuda.stream(self._stream):
            if recorded is not None:
                return recorded.run(inputs, wanted)
            profile = (
                0
                if self._plan.implicit_max_batch
                else choose_profile(self._plan, self._profiles, extents)
            )
            return self._contexts[profile].run(inputs, wanted)

    def _find_recorded_graph(self, extents: Mapping[str, Extent]) -> "Optional[_RecordedGraph]":
        graph = choose_graph([each.graph for each in self._recorded_graphs], extents)
        if graph is None or (self._has_non_linear_inputs and graph.extents != extents):
            return None  # inputs in a non-linear layout cannot be padded
        return next(each for each in self._recorded_graphs if each.graph is graph)

    def _make_context(self, opened: OpenedPlan, profile: int) -> "_ExecutionContext":
        return _ExecutionContext(opened, self._plan, profile, self._stream, self._working_memory)


def _extent(tensor: PlanTensor, value: Value) -> Extent:
    if tensor.is_shape_tensor and not isinstance(value, RawTensor):
        return tuple(value.reshape(-1).tolist())
    return tuple(value.shape)


def _allocate_working_memory(engine: Any) -> Optional[Any]:
    """Returns working memory for any context; None if contexts allocate it (TensorRT < 10.1)."""
    if not hasattr(engine, "device_memory_size_v2"):
        return None
    return torch.empty(max(1, engine.device_memory_size_v2), dtype=torch.uint8, device="cuda")


class _ExecutionContext:
    """One context, with memory for its inputs and outputs that grows as needed."""

    def __init__(
        self, opened: OpenedPlan, plan: Plan, profile: int, stream: Any, scratch: Optional[Any]
    ) -> None:
        self.plan = plan
        self._log = opened.log
        self.stream = stream
        if scratch is None:
            self.context = opened.engine.create_execution_context()
        else:
            strategies = tensorrt.ExecutionContextAllocationStrategy
            self.context = opened.engine.create_execution_context(strategies.USER_MANAGED)
        if self.context is None:
            raise self._failure("no context can be made")
        if scratch is not None:
            self.context.set_device_memory(scratch.data_ptr(), scratch.numel())
        if not plan.implicit_max_batch:
            self._check_done(
                self.context.set_optimization_profile_async(profile, stream.cuda_stream),
                f"optimization profile {profile} cannot be set",
            )
            stream.synchronize()
        self._device_buffers: Dict[str, Any] = {}
        self._host_buffers: Dict[str, Array] = {}
        self._allocators: Dict[str, _OutputAllocator] = {}

    def run(self, inputs: Mapping[str, Value], wanted: Sequence[str]) -> Dict[str, Value]:
        for tensor in self.plan.inputs:
            self.set_input_shape(tensor, inputs[tensor.name].shape)
            self.copy_input(tensor, inputs[tensor.name])
        rows = len(inputs[self.plan.inputs[0].name]) if self.plan.implicit_max_batch else 0
        shapes = self.allocate_outputs(rows)
        self.enqueue(rows)
        return self.read_outputs(shapes, wanted)

    def set_input_shape(self, tensor: PlanTensor, shape: Sequence[int]) -> None:
        if not self.plan.implicit_max_batch:
            size = tuple(int(each) for each in shape)
            self._check_done(
                self.context.set_input_shape(tensor.name, size),
                f"the shape of '{tensor.name}' cannot be set to {list(size)}",
            )

    def copy_input(self, tensor: PlanTensor, value: Value) -> None:
        """Copies an input to where the engine reads it. Raises InvalidInput."""
        data = value.data if isinstance(value, RawTensor) else np.ascontiguousarray(value)
        needed = tensor.nbytes(value.shape)
        if data.nbytes != needed:
            raise InvalidInput(
                f"input '{tensor.name}' has {data.nbytes} bytes, and the engine's format"
                f" {tensor.layout.description} takes {needed} for the shape {list(value.shape)}"
            )
        if tensor.on_host:
            buffer = self._host_buffer(tensor, value.shape)
            buffer[...] = data
            return
        target = self._device_buffer(tensor.name, needed)
        if needed:
            source = array_at(address_of(data), np.dtype(np.uint8), [needed], data, writable=True)
            target[:needed].copy_(torch.from_numpy(source))

    def allocate_outputs(self, rows: int) -> Dict[str, Extent]:
        """Allocates outputs; returns their shapes, except for those known only after the run."""
        if not self.plan.implicit_max_batch:
            with self._raise_runtime_errors("shapes cannot be inferred"):
                missing = self.context.infer_shapes()
            if missing:
                raise self._failure(f"these are not specified: {', '.join(missing)}")
        shapes: Dict[str, Extent] = {}
        for tensor in self.plan.outputs:
            shape = (rows, *tensor.shape)
            if not self.plan.implicit_max_batch:
                shape = tuple(self.context.get_tensor_shape(tensor.name))
            if min(shape, default=0) < 0:
                self._add_output_allocator(tensor)
                continue
            shapes[tensor.name] = shape
            if tensor.on_host:
                self._host_buffer(tensor, shape)
            else:
                self._device_buffer(tensor.name, tensor.nbytes(shape))
        return shapes

    def enqueue(self, rows: int) -> None:
        handle = self.stream.cuda_stream
        if self.plan.implicit_max_batch:
            addresses = [
                self._device_buffers[tensor.name].data_ptr() for tensor in self.plan.tensors
            ]
            done = self.context.execute_async(rows, addresses, handle)
        else:
            done = self.context.execute_async_v3(handle)
        self._check_done(done, "the engine cannot be run")

    def read_outputs(self, shapes: Mapping[str, Extent], wanted: Sequence[str]) -> Dict[str, Value]:
        self.stream.synchronize()
        found: Dict[str, Value] = {}
        for tensor in self.plan.outputs:
            if tensor.name not in wanted:
                continue
            allocator = self._allocators.get(tensor.name)
            shape = shapes[tensor.name] if allocator is None else allocator.shape
            if tensor.on_host:
                found[tensor.name] = self._host_buffers[tensor.name].copy()
            else:
                memory = (
                    self._device_buffers[tensor.name] if allocator is None else allocator.memory
                )
                found[tensor.name] = _read_output(tensor, memory, shape)
        return found

    def record_graph(self, graph: GraphSpec) -> "Optional[_RecordedGraph]":
        """Records a run with inputs of that size; returns None and warns if that fails."""
        for tensor in self.plan.inputs:
            extent = graph.extents[tensor.name]
            zeros = np.zeros(extent, STORAGE_DTYPES[tensor.data_type])
            if tensor.is_shape_tensor:
                zeros = np.array(extent, STORAGE_DTYPES[tensor.data_type]).reshape(tensor.shape)
            self.set_input_shape(tensor, zeros.shape)
            value: Value = zeros
            if not tensor.layout.linear:
                value = RawTensor(np.zeros(tensor.nbytes(extent), np.uint8), extent)
            self.copy_input(tensor, value)
        shapes = self.allocate_outputs(0)
        self.enqueue(0)  # the first run does initial work that cannot be recorded
        self.stream.synchronize()
        recording = torch.cuda.CUDAGraph()
        why = "its outputs have no size that is known before"
        if not self._allocators:
            try:
                with torch.cuda.graph(recording, stream=self.stream):
                    self.enqueue(0)
                return _RecordedGraph(graph, self, recording, shapes)
            except (RuntimeError, pb_utils.TritonModelException) as error:
                why = str(error)
        pb_utils.Logger.log_warn(
            f"no CUDA graph can be recorded for {graph.extents}, such batches run without one:"
            f" {why}"
        )
        return None

    def _device_buffer(self, name: str, nbytes: int) -> Any:
        memory = self._device_buffers.get(name)
        if memory is None or memory.numel() < nbytes:
            memory = torch.empty(max(1, nbytes), dtype=torch.uint8, device="cuda")
            self._device_buffers[name] = memory
            self._set_address(name, memory.data_ptr())
        return memory

    def _host_buffer(self, tensor: PlanTensor, shape: Sequence[int]) -> Array:
        buffer = self._host_buffers.get(tensor.name)
        if buffer is None or buffer.shape != tuple(shape):
            buffer = self._host_buffers[tensor.name] = np.zeros(
                shape, STORAGE_DTYPES[tensor.data_type]
            )
            self._set_address(tensor.name, buffer.ctypes.data)
        return buffer

    def _add_output_allocator(self, tensor: PlanTensor) -> None:
        if tensor.name not in self._allocators:
            allocator = self._allocators[tensor.name] = _OutputAllocator()
            self.context.set_output_allocator(tensor.name, allocator)

    def _set_address(self, name: str, address: int) -> None:
        if not self.plan.implicit_max_batch:
            self._check_done(
                self.context.set_tensor_address(name, address), f"'{name}' cannot be placed"
            )

    def _check_done(self, done: bool, what: str) -> None:
        if not done:
            raise self._failure(what)

    @contextmanager
    def _raise_runtime_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._failure(f"{what}: {error}") from error

    def _failure(self, what: str) -> pb_utils.TritonModelException:
        return pb_utils.TritonModelException(f"TensorRT: {what}: {self._log.take_errors()}")


class _RecordedGraph(NamedTuple):
    """A recorded graph, and the context whose memory it reads and writes."""

    graph: GraphSpec
    context: _ExecutionContext
    recording: Any
    shapes: Dict[str, Extent]

    def run(self, inputs: Mapping[str, Value], wanted: Sequence[str]) -> Dict[str, Value]:
        for tensor in self.context.plan.inputs:
            if not tensor.is_shape_tensor:  # the graph has recorded the values of these
                extent = self.graph.extents[tensor.name]
                self.context.copy_input(tensor, _padded(inputs[tensor.name], extent))
        self.recording.replay()
        return self.context.read_outputs(self.shapes, wanted)


def _padded(value: Value, shape: Extent) -> Value:
    if isinstance(value, RawTensor) or value.shape == shape:
        return value
    larger = np.zeros(shape, value.dtype)
    larger[tuple(slice(size) for size in value.shape)] = value
    return larger


def _read_output(tensor: PlanTensor, memory: Any, shape: Extent) -> Value:
    nbytes = tensor.nbytes(shape)
    if not tensor.layout.linear:
        raw = np.empty(nbytes, np.uint8)
        torch.from_numpy(raw).copy_(memory[:nbytes])
        return RawTensor(raw, shape)
    dtype = STORAGE_DTYPES[tensor.data_type]
    array = allocate_output(dtype, shape) if nbytes >= MIN_BYTES else None
    if array is None:
        array = np.empty(shape, dtype)
    if nbytes:
        torch.from_numpy(array.reshape(-1).view(np.uint8)).copy_(memory[:nbytes])
    return array


class _OutputAllocator(tensorrt.IOutputAllocator):  # type: ignore[misc]
    """Memory for an output whose size is known only during the run."""

    def __init__(self) -> None:
        tensorrt.IOutputAllocator.__init__(self)
        self.memory: Any = torch.empty(1, dtype=torch.uint8, device="cuda")
        self.shape: Tuple[int, ...] = ()

    def reallocate_output_async(
        self, tensor_name: str, memory: int, size: int, alignment: int, stream: int
    ) -> int:
        """Called by the library. PyTorch's memory is aligned to 512 bytes."""
        return self.reallocate_output(tensor_name, memory, size, alignment)

    def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
        """Called by the library before TensorRT 10."""
        if self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        return int(self.memory.data_ptr())

    def notify_shape(self, tensor_name: str, shape: Any) -> None:
        """Called by the library when the output's shape is known."""
        self.shape = tuple(shape)
