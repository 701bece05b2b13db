"""A fuzzer: random models, layouts and methods together, each trained exactly as one device.

A case follows from its seed. It trains two or three steps with the production steps on real
processes, and its losses, norms, gradients and parameters must be those of one device without any
method that saves memory. Some cases move: they stop in between, save a checkpoint, and go on under
another layout with other methods. In float32, bfloat16 and float16 a case must only not fail.

    python -m tests.support.fuzz --seed 17           # that case alone
    python -m tests.support.fuzz --seed 17 --shrink  # the shortest case that fails likewise
    python -m tests.support.fuzz --cases 400 --from 1000
    python -m tests.support.fuzz --case '{...}'      # a case that a failure printed
"""
