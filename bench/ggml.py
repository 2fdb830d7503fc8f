"""Runs ggml's own Gated DeltaNet on the CPU, through ctypes, from llama-cpp-python's libraries or a folder of them.

ggml has one op for prefill and decode, which goes token by token in float32. It multiplies q by K ** -0.5, lets value
head i read key head i % H, and returns the output and the new state in one tensor.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_bool, c_float, c_int, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from bench.installed import library_folder
from torch_gdn_check.registry.cases import Case

FOLDER = "TORCH_GDN_GGML"  # the environment variable for the folder of libggml-base and libggml-cpu
FLOAT32 = 0  # GGML_TYPE_F32


class InitParams(Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class Plan(Structure):
    _fields_ = (
        ("work_size", c_size_t),
        ("work_data", POINTER(c_uint8)),
        ("n_threads", c_int),
        ("threadpool", c_void_p),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("use_ref", c_bool),
    )


class ThreadpoolParams(Structure):
    _fields_ = (
        ("cpumask", c_bool * 512),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


def folder() -> Path:
    """Returns the folder. Raises ImportError, which says what is missing."""
    result = library_folder("llama_cpp", FOLDER, "lib")
    if result is None:
        raise ImportError(f"llama-cpp-python is not installed, and {FOLDER} does not name ggml's folder")
    return result


def load() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    paths = [next(iter(sorted(folder().glob(f"libggml-{part}*.so*"))), None) for part in ("base", "cpu")]
    if None in paths:
        raise ImportError(f"no libggml-base and libggml-cpu in {folder()}")
    base, cpu = (ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in paths)
    if not hasattr(base, "ggml_gated_delta_net"):
        raise ImportError(f"the ggml in {folder()} has no ggml_gated_delta_net")
    pointer = c_void_p
    base.ggml_init.argtypes, base.ggml_init.restype = [InitParams], pointer
    base.ggml_new_tensor_4d.argtypes, base.ggml_new_tensor_4d.restype = [pointer, c_int, *[c_int64] * 4], pointer
    base.ggml_gated_delta_net.argtypes = [*[pointer] * 7, c_int64]
    base.ggml_gated_delta_net.restype = pointer
    base.ggml_get_data.argtypes, base.ggml_get_data.restype = [pointer], pointer
    base.ggml_new_graph.argtypes, base.ggml_new_graph.restype = [pointer], pointer
    base.ggml_build_forward_expand.argtypes, base.ggml_build_forward_expand.restype = [pointer, pointer], None
    base.ggml_free.argtypes, base.ggml_free.restype = [pointer], None
    base.ggml_threadpool_params_default.argtypes = [c_int]
    base.ggml_threadpool_params_default.restype = ThreadpoolParams
    cpu.ggml_cpu_init.restype = None
    cpu.ggml_threadpool_new.argtypes, cpu.ggml_threadpool_new.restype = [POINTER(ThreadpoolParams)], pointer
    cpu.ggml_threadpool_free.argtypes, cpu.ggml_threadpool_free.restype = [pointer], None
    cpu.ggml_graph_plan.argtypes, cpu.ggml_graph_plan.restype = [pointer, c_int, pointer], Plan
    cpu.ggml_graph_compute.argtypes, cpu.ggml_graph_compute.restype = [pointer, POINTER(Plan)], c_int
    return base, cpu


class GatedDeltaNet:
    """One case as a graph of one op. Its threads wait between calls, and each call() computes the graph again."""

    def __init__(self, case: Case, threads: int) -> None:
        self.base, self.cpu = load()
        self.cpu.ggml_cpu_init()
        self.B, self.T, self.HV, self.V = case.v.shape
        self.H = case.q.size(2)
        state = case.initial_state if case.initial_state is not None else torch.zeros(self.B, self.HV, self.V, self.V)
        ordered = self._tiled
        inputs = (
            case.q,
            case.k,
            ordered(case.v, 2),
            ordered(case.g, 2)[..., None],
            ordered(case.beta, 2)[..., None],
            ordered(state, 1).transpose(-1, -2),
        )
        size = 4 * sum(x.numel() for x in inputs) + 4 * (case.v.numel() + state.numel()) + 2**22
        self.context = c_void_p(self.base.ggml_init(InitParams(size, None, False)))
        tensors = [self._tensor(x.float().contiguous()) for x in inputs]
        self.result = c_void_p(self.base.ggml_gated_delta_net(self.context, *tensors, 1))
        self.graph = c_void_p(self.base.ggml_new_graph(self.context))
        self.base.ggml_build_forward_expand(self.graph, self.result)
        self.pool = c_void_p(self.cpu.ggml_threadpool_new(byref(self.base.ggml_threadpool_params_default(threads))))
        self.plan = self.cpu.ggml_graph_plan(self.graph, threads, self.pool)
        self.work = (c_uint8 * max(1, self.plan.work_size))()
        self.plan.work_data = ctypes.cast(self.work, POINTER(c_uint8))

    def _tiled(self, x: Tensor, dim: int) -> Tensor:
        """Reorders value heads so that head i % H is the key head that was i // (HV / H)."""
        return x.unflatten(dim, (self.H, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)

    def _blocked(self, x: Tensor, dim: int) -> Tensor:
        return x.unflatten(dim, (-1, self.H)).transpose(dim, dim + 1).flatten(dim, dim + 1)

    def _tensor(self, x: Tensor) -> c_void_p:
        tensor = c_void_p(self.base.ggml_new_tensor_4d(self.context, FLOAT32, *reversed(x.shape)))
        ctypes.memmove(self.base.ggml_get_data(tensor), x.data_ptr(), 4 * x.numel())
        return tensor

    def call(self) -> None:
        if self.cpu.ggml_graph_compute(self.graph, byref(self.plan)) != 0:
            raise RuntimeError("ggml_graph_compute failed")

    def output(self) -> tuple[Tensor, Tensor]:
        """Returns o [B, T, HV, V] and the final state [B, HV, K, V] of the last call."""
        count = self.B * self.T * self.HV * self.V
        states = self.B * self.HV * self.V * self.V
        address = self.base.ggml_get_data(self.result)
        flat = torch.tensor((c_float * (count + states)).from_address(address))
        o = flat[:count].view(self.B, self.T, self.HV, self.V)
        state = flat[count:].view(self.B, self.HV, self.V, self.V).transpose(-1, -2)
        return self._blocked(o, 2), self._blocked(state, 1)

    def __del__(self) -> None:
        if hasattr(self, "pool"):
            self.cpu.ggml_threadpool_free(self.pool)
            self.base.ggml_free(self.context)
