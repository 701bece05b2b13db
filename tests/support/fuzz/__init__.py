"""A fuzzer: random models, layouts and methods together, each trained exactly as one device.

A case follows from its seed. It trains two or three steps with the production code on real
processes, and its losses, norms, gradients and parameters must equal those of one device that uses
no memory-saving method. Some cases move: they stop, save a checkpoint, and continue under another
layout with other methods. In float32, bfloat16 and float16 a case only has to run without failing.

    python -m tests.support.fuzz --seed 17           # only this case
    python -m tests.support.fuzz --seed 17 --shrink  # a shortest case that fails the same way
    python -m tests.support.fuzz --cases 400 --from 1000
    python -m tests.support.fuzz --case '{...}'      # a case that a failure printed
"""
