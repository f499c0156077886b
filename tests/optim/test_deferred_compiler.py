"""torch's optimizers and determinism do without its compiler until something imports that."""

import json
import os
import subprocess
import sys

PROGRAM = """
import copy, json, os, sys, torch
from torch.optim import Optimizer
from phasetrain.optim.deferred_compiler import defer_compiler
from phasetrain.optim.optimizers import list_torch_optimizers
from phasetrain.runtime.machine import Machine

def train(name):
    kind = getattr(torch.optim, name)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.5)
    losses = []
    def closure():
        optimizer.zero_grad()
        loss = (weight ** 2 - weight).sum()
        loss.backward()
        losses.append(torch.is_grad_enabled())
        return loss
    for _ in range(2):
        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if name != "LBFGS":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert torch.is_grad_enabled() and all(losses)
    return weight.tolist()

names = sorted(set(list_torch_optimizers()) - {"SparseAdam", "Muon"})
defer_compiler({Optimizer, *list_torch_optimizers().values()})
machine = Machine(torch.device("cpu"))
with machine.apply_settings():
    deferred = {name: train(name) for name in names}
    assert torch.are_deterministic_algorithms_enabled()
with machine.apply_settings():
    is_imported = {"torch._dynamo", "torch._inductor"} & {*sys.modules}
    import torch._inductor.config as compiler
    flags = [compiler.deterministic]
    usual = {name: train(name) for name in names}
flags += [compiler.deterministic]
with machine.apply_settings():
    flags += [compiler.deterministic]
left = os.environ["TORCHINDUCTOR_DETERMINISTIC"]
json.dump([bool(is_imported), flags, left, deferred, usual], sys.stdout)
"""


def test_compiler_is_not_imported_and_changes_no_bit() -> None:
    environment = os.environ | {"TORCHINDUCTOR_DETERMINISTIC": "0"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    is_imported, flags, left, deferred, usual = json.loads(done.stdout)
    assert not is_imported
    assert flags == [True, False, True]
    assert left == "0"
    assert len(usual) > 8
    assert deferred == usual
