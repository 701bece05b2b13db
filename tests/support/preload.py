"""Imported by the server that processes are forked from, so that they need not import it again.

A mistake in the package must fail the tests that use it, not the server.
"""

import contextlib
import importlib

import torch

torch.set_num_threads(1)
for name in (
    *("pytest", "hypothesis", "matplotlib.pyplot", "safetensors"),
    *("torch.testing._internal.distributed.fake_pg", "torch.utils.tensorboard"),
    *("gridformer.cli.app", "gridformer.launch.run", "benchmarks.memory.measure"),
    *("gridformer.record.rank", "tests.support.fake_gpu", "tests.support.multirank.exactness"),
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
