"""Runs an engine on a GPU: contexts, memory, one stream, and graphs that are recorded.

Memory and streams are PyTorch's, as that is what pbhost has for GPUs already: it knows CUDA graphs,
and its allocator is one that engines get along with. Everything is bytes here.
"""

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import tensorrt
import torch

import pb_utils
from pb_utils._storage import address_of, borrow
from stub.backends.batch import Array, BadInput, Raw
from stub.backends.placed import LEAST, room_for
from stub.backends.tensorrt.graphs import Graph, choose_graph
from stub.backends.tensorrt.library import Opened
from stub.backends.tensorrt.plan import STORED, Extent, Io, Plan
from stub.backends.tensorrt.profiles import choose

Value = Union[Array, Raw]


class Runner:
    """One context for each profile, and one for each graph; they share their working memory."""

    def __init__(
        self, opened: Opened, plan: Plan, profiles: Sequence[int], graphs: Sequence[Graph]
    ) -> None:
        self._plan = plan
        self._profiles = profiles
        self._stream = torch.cuda.Stream()
        self._raw = any(not tensor.layout.linear for tensor in plan.inputs)
        with torch.cuda.stream(self._stream):
            self._scratch = _scratch(opened.engine)
            self._lanes = {each: self._lane(opened, each) for each in profiles}
            self._recorded: List[_Recorded] = []
            for graph in graphs:
                lane = self._lane(opened, graph.profile)
                recorded = lane.record(graph)
                if recorded is not None:
                    self._recorded.append(recorded)

    def run(self, inputs: Mapping[str, Value], wanted: Sequence[str]) -> Dict[str, Value]:
        """The outputs that are wanted. Raises BadInput, and TritonModelException."""
        extents = {each.name: _extent(each, inputs[each.name]) for each in self._plan.inputs}
        recorded = self._recorded_for(extents)
        with torch.cuda.stream(self._stream):
            if recorded is not None:
                return recorded.run(inputs, wanted)
            profile = 0 if self._plan.implicit else choose(self._plan, self._profiles, extents)
            return self._lanes[profile].run(inputs, wanted)

    def _recorded_for(self, extents: Mapping[str, Extent]) -> "Optional[_Recorded]":
        graph = choose_graph([each.graph for each in self._recorded], extents)
        if graph is None or (self._raw and graph.extents != extents):
            return None  # what is in a layout of its own cannot be filled up
        return next(each for each in self._recorded if each.graph is graph)

    def _lane(self, opened: Opened, profile: int) -> "_Lane":
        return _Lane(opened, self._plan, profile, self._stream, self._scratch)


def _extent(tensor: Io, value: Value) -> Extent:
    if tensor.of_shape and not isinstance(value, Raw):
        return tuple(value.reshape(-1).tolist())
    return tuple(value.shape)


def _scratch(engine: Any) -> Optional[Any]:
    """Working memory for any context; None if contexts bring their own, before TensorRT 10.1."""
    if not hasattr(engine, "device_memory_size_v2"):
        return None
    return torch.empty(max(1, engine.device_memory_size_v2), dtype=torch.uint8, device="cuda")


class _Lane:
    """One context, with the memory of its inputs and outputs, which grows as needed."""

    def __init__(
        self, opened: Opened, plan: Plan, profile: int, stream: Any, scratch: Optional[Any]
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
        if not plan.implicit:
            self._must(
                self.context.set_optimization_profile_async(profile, stream.cuda_stream),
                f"optimization profile {profile} cannot be set",
            )
            stream.synchronize()
        self._memory: Dict[str, Any] = {}
        self._on_host: Dict[str, Array] = {}
        self._allocators: Dict[str, _Allocator] = {}

    def run(self, inputs: Mapping[str, Value], wanted: Sequence[str]) -> Dict[str, Value]:
        for tensor in self.plan.inputs:
            self.set_size(tensor, inputs[tensor.name].shape)
            self.put(tensor, inputs[tensor.name])
        rows = len(inputs[self.plan.inputs[0].name]) if self.plan.implicit else 0
        shapes = self.prepare(rows)
        self.enqueue(rows)
        return self.fetch(shapes, wanted)

    def set_size(self, tensor: Io, shape: Sequence[int]) -> None:
        if not self.plan.implicit:
            size = tuple(int(each) for each in shape)
            self._must(
                self.context.set_input_shape(tensor.name, size),
                f"the shape of '{tensor.name}' cannot be set to {list(size)}",
            )

    def put(self, tensor: Io, value: Value) -> None:
        """Copy an input to where the engine reads it."""
        data = value.data if isinstance(value, Raw) else np.ascontiguousarray(value)
        needed = tensor.nbytes(value.shape)
        if data.nbytes != needed:
            raise BadInput(
                f"input '{tensor.name}' has {data.nbytes} bytes, and the engine's format"
                f" {tensor.layout.text} takes {needed} for the shape {list(value.shape)}"
            )
        if tensor.on_host:
            held = self._room_on_host(tensor, value.shape)
            held[...] = data
            return
        target = self._room(tensor.name, needed)
        if needed:
            source = borrow(address_of(data), np.dtype(np.uint8), [needed], data, writable=True)
            target[:needed].copy_(torch.from_numpy(source))

    def prepare(self, rows: int) -> Dict[str, Extent]:
        """Make room for outputs. Returns their shapes, without those that a run decides on."""
        if not self.plan.implicit:
            with self._failing("shapes cannot be inferred"):
                missing = self.context.infer_shapes()
            if missing:
                raise self._failure(f"these are not specified: {', '.join(missing)}")
        shapes: Dict[str, Extent] = {}
        for tensor in self.plan.outputs:
            shape = (rows, *tensor.shape)
            if not self.plan.implicit:
                shape = tuple(self.context.get_tensor_shape(tensor.name))
            if min(shape, default=0) < 0:
                self._allocate_later(tensor)
                continue
            shapes[tensor.name] = shape
            if tensor.on_host:
                self._room_on_host(tensor, shape)
            else:
                self._room(tensor.name, tensor.nbytes(shape))
        return shapes

    def enqueue(self, rows: int) -> None:
        handle = self.stream.cuda_stream
        if self.plan.implicit:
            addresses = [self._memory[tensor.name].data_ptr() for tensor in self.plan.tensors]
            done = self.context.execute_async(rows, addresses, handle)
        else:
            done = self.context.execute_async_v3(handle)
        self._must(done, "the engine cannot be run")

    def fetch(self, shapes: Mapping[str, Extent], wanted: Sequence[str]) -> Dict[str, Value]:
        self.stream.synchronize()
        found: Dict[str, Value] = {}
        for tensor in self.plan.outputs:
            if tensor.name not in wanted:
                continue
            allocator = self._allocators.get(tensor.name)
            shape = shapes[tensor.name] if allocator is None else allocator.shape
            if tensor.on_host:
                found[tensor.name] = self._on_host[tensor.name].copy()
            else:
                memory = self._memory[tensor.name] if allocator is None else allocator.memory
                found[tensor.name] = _fetched(tensor, memory, shape)
        return found

    def record(self, graph: Graph) -> "Optional[_Recorded]":
        """Run once with inputs of that size, and record it; None, and a warning, if that fails."""
        for tensor in self.plan.inputs:
            extent = graph.extents[tensor.name]
            zeros = np.zeros(extent, STORED[tensor.data_type])
            if tensor.of_shape:
                zeros = np.array(extent, STORED[tensor.data_type]).reshape(tensor.shape)
            self.set_size(tensor, zeros.shape)
            value: Value = zeros
            if not tensor.layout.linear:
                value = Raw(np.zeros(tensor.nbytes(extent), np.uint8), extent)
            self.put(tensor, value)
        shapes = self.prepare(0)
        self.enqueue(0)  # a first run does what cannot be recorded
        self.stream.synchronize()
        recording = torch.cuda.CUDAGraph()
        why = "its outputs have no size that is known before"
        if not self._allocators:
            try:
                with torch.cuda.graph(recording, stream=self.stream):
                    self.enqueue(0)
                return _Recorded(graph, self, recording, shapes)
            except (RuntimeError, pb_utils.TritonModelException) as error:
                why = str(error)
        pb_utils.Logger.log_warn(
            f"no CUDA graph can be recorded for {graph.extents}, such batches run without: {why}"
        )
        return None

    def _room(self, name: str, nbytes: int) -> Any:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < nbytes:
            memory = torch.empty(max(1, nbytes), dtype=torch.uint8, device="cuda")
            self._memory[name] = memory
            self._set_address(name, memory.data_ptr())
        return memory

    def _room_on_host(self, tensor: Io, shape: Sequence[int]) -> Array:
        held = self._on_host.get(tensor.name)
        if held is None or held.shape != tuple(shape):
            held = self._on_host[tensor.name] = np.zeros(shape, STORED[tensor.data_type])
            self._set_address(tensor.name, held.ctypes.data)
        return held

    def _allocate_later(self, tensor: Io) -> None:
        if tensor.name not in self._allocators:
            allocator = self._allocators[tensor.name] = _Allocator()
            self.context.set_output_allocator(tensor.name, allocator)

    def _set_address(self, name: str, address: int) -> None:
        if not self.plan.implicit:
            self._must(self.context.set_tensor_address(name, address), f"'{name}' cannot be placed")

    def _must(self, done: bool, what: str) -> None:
        if not done:
            raise self._failure(what)

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._failure(f"{what}: {error}") from error

    def _failure(self, what: str) -> pb_utils.TritonModelException:
        return pb_utils.TritonModelException(f"TensorRT: {what}: {self._log.take()}")


class _Recorded(NamedTuple):
    """A graph, and the context whose memory it reads and writes."""

    graph: Graph
    lane: _Lane
    recording: Any
    shapes: Dict[str, Extent]

    def run(self, inputs: Mapping[str, Value], wanted: Sequence[str]) -> Dict[str, Value]:
        for tensor in self.lane.plan.inputs:
            if not tensor.of_shape:  # their values are a part of the graph
                extent = self.graph.extents[tensor.name]
                self.lane.put(tensor, _filled_up(inputs[tensor.name], extent))
        self.recording.replay()
        return self.lane.fetch(self.shapes, wanted)


def _filled_up(value: Value, shape: Extent) -> Value:
    if isinstance(value, Raw) or value.shape == shape:
        return value
    larger = np.zeros(shape, value.dtype)
    larger[tuple(slice(size) for size in value.shape)] = value
    return larger


def _fetched(tensor: Io, memory: Any, shape: Extent) -> Value:
    nbytes = tensor.nbytes(shape)
    if not tensor.layout.linear:
        raw = np.empty(nbytes, np.uint8)
        torch.from_numpy(raw).copy_(memory[:nbytes])
        return Raw(raw, shape)
    dtype = STORED[tensor.data_type]
    array = room_for(dtype, shape) if nbytes >= LEAST else None
    if array is None:
        array = np.empty(shape, dtype)
    if nbytes:
        torch.from_numpy(array.reshape(-1).view(np.uint8)).copy_(memory[:nbytes])
    return array


class _Allocator(tensorrt.IOutputAllocator):  # type: ignore[misc]
    """Memory for an output whose size is known when it is computed."""

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
        """The same, for TensorRT before 10."""
        if self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        return int(self.memory.data_ptr())

    def notify_shape(self, tensor_name: str, shape: Any) -> None:
        """Called by the library when the output is there."""
        self.shape = tuple(shape)
