"""Puts the process that imports it on an emulated CUDA device, as RUN.imports=[emulated_rank] does in
each rank of a run."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from emulated_cuda import emulate_cuda

EMULATION = emulate_cuda(is_strict=True)
EMULATION.__enter__()  # until the process ends

recomputed = ("EMULATION",)
