"""A CUDA device emulated on a CPU build of torch, for tests of the rules of CUDA without a GPU.

Tensors report `cuda:0`, compute on the CPU, and follow the rules that matter to a framework:

- operators reject tensors of different devices, and nondeterministic ones raise in deterministic
  mode;
- reading a value on the host is recorded as a synchronisation, with file and line;
- a non-blocking copy to the host holds garbage until an event, stream or device is synchronised;
- streams are unordered until one waits for another, and memory belongs to the stream that
  allocated it until `record_stream`;
- pickling a tensor is reported, because its reader restores it on the sender's device;
- operators that launch kernels are counted with the line that calls them.

Not emulated: the numerics of CUDA, cuDNN and NCCL, several devices in a process, CUDA graphs,
Inductor, and synchronisations inside of kernels.

Example:
    >>> with emulate_cuda() as device:
    ...     float(torch.ones(3, device="cuda").sum())
    ...     [read.operator for read in device.waits]
    3.0
    ['_local_scalar_dense']
"""

from emulated_cuda.api import emulate_cuda, why_not_emulated
from emulated_cuda.device import Device, Record

__all__ = ["Device", "Record", "emulate_cuda", "why_not_emulated"]
