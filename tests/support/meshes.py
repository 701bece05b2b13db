"""Meshes and their traffic, for tests of where ranks lie."""

import math

from hypothesis import strategies as st

from gridformer.config import divisors
from gridformer.mesh.node_placement import MESH_AXES, Sizes

Traffic = dict[str, int]
MIB = 2**20


def grid(n_rows: int, n_cols: int) -> Sizes:
    return 1, 1, n_rows, n_cols


@st.composite
def cases(draw: st.DrawFn) -> tuple[Sizes, Traffic, int]:
    """Draw a mesh, its traffic, and a node size that divides the mesh or holds all of it."""
    size = st.sampled_from([1, 1, 2, 3, 4, 5, 6, 8])
    sizes: Sizes = draw(st.tuples(st.integers(1, 3), st.integers(1, 4), size, size))
    n = math.prod(sizes)
    traffic = {axis: draw(st.sampled_from([0, 1, 2, 3, 7, 1000])) for axis in MESH_AXES}
    return sizes, traffic, draw(st.sampled_from([*divisors(n), n + 1, 2 * n]))
