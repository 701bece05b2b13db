"""What gridformer does on one GPU: the matrix ceiling, a training step, the schemes' numerics."""
