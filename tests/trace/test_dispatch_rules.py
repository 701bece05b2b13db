"""Torch still finds the rules of dispatch modes."""

from __future__ import annotations

import subprocess
import sys

from torch._library import simple_registry

from gridformer.trace import dispatch_rules
from gridformer.trace.fast_fake import fast_fakes

# In a process of its own, because torch keeps the function of its first use.
CODE = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from gridformer.trace import dispatch_rules

asked = []
real = dispatch_rules._rule_of

def noting(op, mode):
    asked.append(str(op))
    return real(op, mode)

dispatch_rules._rule_of = noting
dispatch_rules.remember_rules()

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

@torch.library.custom_op("tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

x = torch.ones(1)
with Mode():
    print(twice(x).item())
torch.library.register_torch_dispatch("tests::twice", Mode, lambda *_: torch.full((1,), 7.0))
with Mode():
    print(twice(x).item(), (x + x).item())
print(any("twice" in one for one in asked), any("add" in one for one in asked))
"""


def test_rules_are_found_also_if_they_are_registered_late() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2.0", "7.0", "2.0", "True", "True"]


def test_fake_tensors_make_torch_remember_rules() -> None:
    fast_fakes()
    assert simple_registry.find_torch_dispatch_rule is dispatch_rules._rule_of
