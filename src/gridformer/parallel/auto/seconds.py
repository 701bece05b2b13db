"""How long the products of a choice take on a cluster, with the messages that they wait for.

`ProductTimes` asks `gridformer.cluster` for each kernel and message of one product, and hides
messages behind the kernels that run meanwhile, as `gridformer.plan.products` does for a whole step.
What all options of a product have in common is left out.
"""

from __future__ import annotations

from typing import NamedTuple

from gridformer.cluster import (
    Cluster,
    KernelWork,
    MessageWork,
    kernel_s,
    like_messages,
    load_cluster,
    message_cpu_s,
    message_s,
)
from gridformer.cluster.messages import Op
from gridformer.config import LayoutConfig
from gridformer.mesh.node_placement import NodeBlock
from gridformer.parallel.auto.cost import Choice, Choices
from gridformer.parallel.auto.formulas import (
    Way,
    boundary_op,
    cut_widths,
    product_work,
    traveling_width,
)
from gridformer.parallel.registry import spec_of

_TERMS = 4  # bytes of an element of a weight's gradient that is added up chunk by chunk
# Kernels that the host launches for a product and the work around it, in a forward and in a
# backward pass, and for each chunk (messages, copies, gradients cast and added up) or panel (two
# messages, a product and the sum of its terms), as traces of GPT-2 count it. A GPU waits for its
# host where that is slower.
_LAUNCHES, _PER_CHUNK, _PER_PANEL = (9, 19), (4, 7), (4, 8)
_STATISTICS = 8  # bytes that a norm sends for each token: two sums in float32


class _Message(NamedTuple):
    """Seconds of a message, and for how many of them it takes a core from kernels."""

    seconds: float
    cpu: float

    def behind(self, kernels_s: float) -> float:
        """Returns the seconds that are left to wait for it after kernels that run meanwhile."""
        return max(self.cpu, self.seconds - kernels_s) if self.seconds else 0.0

    def in_turns(self, n: int, kernels_s: float) -> float:
        """Returns the seconds to wait for n of them, which take turns with kernels.

        Nothing hides the first, or the last.
        """
        each = kernels_s / n
        return self.seconds + (n - 1) * self.behind(each)


class ProductTimes:
    """Computes the seconds of products on the cluster of a layout.

    Args:
        choices: The sizes and the work; its choices do not matter.
        layout: The layout, whose `cluster` is set.
        block: The block of the mesh on each node, or None if ranks are placed in order.

    Raises:
        ConfigError: There is no such cluster.
    """

    def __init__(self, choices: Choices, layout: LayoutConfig, block: NodeBlock | None) -> None:
        self.choices, self.work = choices, choices.work
        self.cluster = load_cluster(layout.cluster).for_processes(layout.n_processes)
        boundary = spec_of(layout).boundary(layout)
        self.axis, self.lies = boundary.axis, boundary.lies
        self.on_cpu = self.cluster.device.kind == "cpu"
        self.launch_s = self.cluster.host.launch_us.value * 1e-6
        self.places = _places(layout, block, self.cluster)
        self._kernels: dict[tuple[int, int, int], float] = {}
        self._messages: dict[tuple[str, float, str], _Message] = {}

    def step_s(self, choice: Choice) -> float:
        """Returns the seconds of all such products in a step, the messages included."""
        product, work = choice.product, self.work
        if choice.common:
            return 0.0  # the same for every choice
        forward, backward = self._norm_s(choice), self._norm_s(choice)
        if choice.schedule == "gather":
            first, later, back = self._gathered(choice)
        else:
            first, back = self._panels(choice)
            later = first
        again = work.recompute == "full" and product.section != "head" and not product.ends_block
        m = work.micro_batches
        total = first + forward + (m - 1) * (later + forward) + m * (back + backward)
        return product.count * (total + again * m * (later + forward))

    # ------------------------------------------------------------------ schedules

    def _gathered(self, choice: Choice) -> tuple[float, float, float]:
        """Returns the seconds of a forward pass, of one with kept weights, and of a backward pass.

        Chunks of an activation travel while those before them are multiplied, and a weight while
        the product before this one is computed, which is taken to be as long as this one.
        """
        chunks, (m, n, k) = choice.n_chunks, self._shape(choice)
        whole, m = m, max(1, m // chunks)
        one, grad_x = chunks * self.kernel_s(m, n, k), chunks * self.kernel_s(m, k, n)
        grad_w = chunks * self.kernel_s(k, n, m)
        weight = n * k * self.work.itemsize
        copies = [0.0, 0.0]
        if chunks > 1:  # results are copied to their places, and gradients of weights added up
            item, c = self.work.itemsize, self.choices.cols
            width = (n, k // c) if choice.stays == "output" else (n // c, k)
            copies = [self._moved_s(2 * whole * one_width * item) for one_width in width]
            copies[1] += self._moved_s(n * k * chunks * (2 * _TERMS + item))
        enter = self._activation(choice, "enter", chunks)
        leave = self._activation(choice, "leave", chunks)
        forward, backward = one + copies[0], grad_x + grad_w + copies[1]
        if choice.stays == "output":
            forward += enter.in_turns(chunks, one)
            backward += leave.behind(grad_w / chunks) * chunks
            if not choice.keep_input:
                backward += enter.behind(grad_x / chunks) * chunks
        else:
            forward += leave.in_turns(chunks, one)
            backward += enter.in_turns(chunks, grad_x + grad_w)
        more = chunks if chunks > 1 else 0
        forward, backward = self._launched(forward, backward, more, _PER_CHUNK)
        gather = self.message_s("all_gather", weight, "row")
        backward += self.message_s("reduce_scatter", weight, "row").behind(grad_x)
        first = forward + gather.behind(forward)
        if choice.keep_weight:
            return first, forward, backward
        return first, first, backward + gather.behind(backward / 2)

    def _panels(self, choice: Choice) -> tuple[float, float]:
        """Returns the seconds of a forward and of a backward pass panel by panel."""
        m, n, k = self._shape(choice)
        k = max(1, k // self.choices.panels)
        chunks = self.choices.loss_chunks(choice)
        m, panels = max(1, m // chunks), self.choices.panels * chunks
        size = self._activation_bytes(choice) / panels
        one = panels * self.kernel_s(m, n, k)
        back = panels * (self.kernel_s(m, k, n) + self.kernel_s(k, n, m))
        # Those on the rows and those on the columns of the grid travel at the same time.
        there: Op = "broadcast" if choice.stays == "output" else "reduce"
        over = self.message_s(there, size, self.axis)
        down = self.message_s("broadcast", n * k * self.work.itemsize, "row")
        panel = max(over, down, key=lambda message: message.seconds)
        panel = _Message(panel.seconds, over.cpu + down.cpu)
        forward, backward = one + panels * panel.seconds, back + 2 * panels * panel.seconds
        if choice.schedule == "pipelined":
            forward = one + panel.in_turns(panels, one)
            backward = back + panel.in_turns(2 * panels, back)
        return self._launched(forward, backward, panels, _PER_PANEL)

    def _launched(
        self, forward: float, backward: float, parts: int, each: tuple[int, int]
    ) -> tuple[float, float]:
        """Returns the seconds of both passes, given those of the device.

        The host launches `each` kernels per part, which may take longer than the device.
        """
        device = forward, backward
        host = [(n + parts * more) * self.launch_s for n, more in zip(_LAUNCHES, each)]
        if self.on_cpu:  # the host is the device
            return device[0] + host[0], device[1] + host[1]
        return max(device[0], host[0]), max(device[1], host[1])

    # ------------------------------------------------------------------ kernels and messages

    def _shape(self, choice: Choice) -> tuple[int, int, int]:
        """Returns (m, n, k) of a device's product [m, k] x [k, n] with whole operands."""
        m = max(1, self.work.rows_of(choice.product) // self.choices.rows)
        k, n = cut_widths(choice, self.choices.cols)
        return m, n, k

    def _activation_bytes(self, choice: Choice) -> float:
        """Returns the bytes of the whole activation that travels."""
        rows = self.work.rows_of(choice.product) / self.choices.rows
        return rows * traveling_width(choice) * self.work.itemsize

    def _activation(self, choice: Choice, way: Way, chunks: int) -> _Message:
        """Returns the message with which a chunk of an activation enters or leaves a section."""
        op = boundary_op(self.choices.between, way)
        if op is None:
            return _Message(0.0, 0.0)
        return self.message_s(op, self._activation_bytes(choice) / chunks, self.axis)

    def _norm_s(self, choice: Choice) -> float:
        """Returns the seconds of a norm's own message, which a norm inside the product saves."""
        if not choice.product.normed or choice.norm_inside or self.lies != "h":
            return 0.0
        tokens = self.work.rows_of(choice.product) / self.choices.rows
        return self.message_s("all_reduce", tokens * _STATISTICS, self.axis).seconds

    def kernel_s(self, m: int, n: int, k: int) -> float:
        """Returns the seconds of a product [m, k] x [k, n] on one device.

        Args:
            m: Rows of the result, those of tokens.
            n: Columns of the result.
            k: The dimension that is summed over.
        """
        if (m, n, k) not in self._kernels:
            dtype = self.work.dtype or "float32"
            work = product_work(1, m, n, k, dtype, self.work.itemsize)
            self._kernels[m, n, k] = kernel_s(self.cluster, work)
        return self._kernels[m, n, k]

    def _moved_s(self, n_bytes: float) -> float:
        return kernel_s(self.cluster, KernelWork("memory", 0.0, n_bytes))

    def message_s(self, op: Op, n_bytes: float, axis: str) -> _Message:
        """Returns the seconds of a message; 0 on an axis of one rank.

        Args:
            op: The kind of message.
            n_bytes: Its bytes, counted as in `cluster.MessageWork`.
            axis: The name of the axis over which it is sent.
        """
        if axis not in self.places:
            return _Message(0.0, 0.0)
        key = op, n_bytes, axis
        if key not in self._messages:
            work = MessageWork(op, n_bytes, *self.places[axis])
            cpu = message_cpu_s(self.cluster, work) if self.on_cpu else 0.0
            self._messages[key] = _Message(message_s(self.cluster, work), cpu)
        return self._messages[key]


def _places(
    layout: LayoutConfig, block: NodeBlock | None, cluster: Cluster
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Returns where a group of each axis of the mesh lies, and how many of them share its links.

    Among the groups of an axis it takes one that spans the most nodes.
    """
    spec, found = spec_of(layout), {}
    ranks = spec.ranks(layout, block)
    for i, name in enumerate(spec.mesh, start=2):
        if ranks.shape[i] == 1:
            continue
        groups: list[list[int]] = ranks.movedim(i, -1).reshape(-1, ranks.shape[i]).tolist()
        widest = max(groups, key=lambda g: len({place // cluster.node_size for place in g}))
        found[name] = tuple(widest), like_messages(cluster, widest, groups)
    return found
