"""Applies the parameters of a configuration that change how PyTorch runs a program."""

from contextlib import ExitStack
from typing import Any

import torch

import pb_utils
from stub.backends.settings import Placement, Settings

_IGNORED_PARAMETERS = (
    "ENABLE_WEIGHT_SHARING",  # instances are processes, each with its own memory
    "ENABLE_NVFUSER",  # PyTorch no longer has it
)


class RunContext:
    """The context manager around calls of the program; it can be entered repeatedly.

    Threads and the TorchScript compiler are set for the whole process, which has only one model.
    Raises ModelFailure for an invalid parameter.
    """

    def __init__(self, settings: Settings, placement: Placement) -> None:
        self._inference = settings.get_bool("INFERENCE_MODE", True)
        self._optimized = not settings.get_bool("DISABLE_OPTIMIZED_EXECUTION", False)
        self._clean = placement.on_gpu and settings.get_bool("ENABLE_CACHE_CLEANING", False)
        if not settings.get_bool("ENABLE_JIT_EXECUTOR", True):
            torch._C._jit_set_profiling_executor(False)
        if not settings.get_bool("ENABLE_JIT_PROFILING", True):
            torch._C._jit_set_profiling_mode(False)
        if "ENABLE_TENSOR_FUSER" in settings.values:
            torch._C._jit_set_texpr_fuser_enabled(settings.get_bool("ENABLE_TENSOR_FUSER", True))
        if not settings.get_bool("ENABLE_CUDNN", True) or settings.get_bool("DISABLE_CUDNN", False):
            torch.backends.cudnn.enabled = False
        threads = settings.get_int("INTRA_OP_THREAD_COUNT", 0)
        if threads:
            torch.set_num_threads(threads)
        threads = settings.get_int("INTER_OP_THREAD_COUNT", 0)
        if threads:
            torch.set_num_interop_threads(threads)
        for name in _IGNORED_PARAMETERS:
            if settings.get_bool(name, False):
                pb_utils.Logger.log_warn(f"parameter '{name}' has no effect")
        self._stack = ExitStack()  # for the current call

    def __enter__(self) -> None:
        if self._inference:
            self._stack.enter_context(torch.inference_mode())
        if not self._optimized:
            self._stack.enter_context(torch.jit.optimized_execution(False))

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
        if self._clean:
            torch.cuda.empty_cache()
