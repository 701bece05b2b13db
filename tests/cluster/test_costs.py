"""Times of single kernels and messages: bounds that hold for any machine, and known volumes."""

import pytest
from benchmarks.planner.fitting import with_fitted

from gridformer.cluster.costs import LINK_EFFICIENCY, KernelWork, kernel_s
from gridformer.cluster.file import Cluster, load_cluster
from gridformer.cluster.messages import MessageWork, like_messages, message_cpu_s, message_s
from gridformer.cluster.tables import AttentionRow, MemoryRow, MessageRow, ProductRow, Tables
from tests.support.round_cluster import round_cluster


@pytest.fixture(scope="module")
def selene() -> Cluster:
    numbers = ("product_efficiency", "memory_efficiency", "inner_efficiency", "outer_efficiency")
    return with_fitted(load_cluster("selene-a100"), dict.fromkeys(numbers, 1.0))


def product(m: int, n: int, k: int, dtype: str = "float16") -> KernelWork:
    moved = 2.0 * (m * k + k * n + m * n)
    return KernelWork("product", 2.0 * m * n * k, moved, dtype, (1, m, n, k))


def test_products_never_exceed_peak_or_bandwidth_and_small_ones_are_inefficient(
    selene: Cluster,
) -> None:
    def rate(work: KernelWork) -> float:
        return work.flop / kernel_s(selene, work) / 312e12

    assert 0.9 < rate(product(8192, 8192, 8192)) <= 1
    assert rate(product(8192, 8192, 64)) < 0.4  # short in k: start and end of every tile
    assert rate(product(256, 256, 8192)) < 0.6  # too few tiles for 108 processors
    thin = product(1, 8192, 8192)
    assert kernel_s(selene, thin) >= thin.bytes / 2039e9


def test_a_product_of_no_rows_takes_the_time_of_its_bytes(selene: Cluster) -> None:
    """Such is that of a router on a device without tokens."""
    for work in (product(0, 64, 2048), product(2048, 64, 0)):
        assert kernel_s(selene, work) == pytest.approx(work.bytes / 2039e9)


def test_memory_bound_kernels_take_their_bytes_over_the_fitted_bandwidth(selene: Cluster) -> None:
    work = KernelWork("memory", 0, 2039e6)
    assert kernel_s(selene, work) == pytest.approx(1e-3)
    slow = with_fitted(selene, {"memory_efficiency": 0.5})
    assert kernel_s(slow, work) == pytest.approx(2e-3)


def test_copies_to_the_host_take_their_bytes_over_the_link(selene: Cluster) -> None:
    copied = kernel_s(selene, KernelWork("copy", 0, 31.5e9))
    assert copied == pytest.approx(1 / LINK_EFFICIENCY)
    assert copied > 20 * kernel_s(selene, KernelWork("memory", 0, 31.5e9))


LINE, PAIRS = (0, 4, 8, 12), (0, 1, 4, 5, 8, 9, 12, 13)  # one and two devices of each of 4 nodes


@pytest.mark.parametrize(
    ("work", "microseconds"),
    [
        # 10 us to begin, what passes the slowest link, and the latency of the hops.
        (MessageWork("all_reduce", 1e6, (0, 1, 2, 3)), 10 + 2 * 3 / 4 * 10 + 6 * 3),
        (MessageWork("all_gather", 1e6, LINE), 10 + 3 / 4 * 100 + 3 * 5),
        (MessageWork("all_gather", 1e6, PAIRS), 10 + 7 / 8 * 100 + 3 * 5 + 4 * 3),
        (MessageWork("reduce", 1e6, LINE), 10 + 100 + 3 * 5),
        (MessageWork("reduce_scatter", 1e6, LINE), 10 + 3 / 4 * 100 + 3 * 5),
        (MessageWork("broadcast", 1e6, LINE), 10 + 100 + 3 * 5),
        (MessageWork("all_to_all", 1e6, (0, 1, 2, 3)), 10 + 3 / 4 * 10 + 3 * 3),
        # A node sends to others what each of its two devices has for the other six.
        (MessageWork("all_to_all", 1e6, PAIRS), 10 + 2 * 6 / 8 * 100 + 3 * 5 + 4 * 3),
        (MessageWork("send", 1e6, (0, 4)), 10 + 100 + 5),
        (MessageWork("send", 1e6, (0, 4), sharers=4), 10 + 2 * 100 + 5),  # four on two links
        # Large sums go round a ring, with 6 hops between nodes and 8 within them.
        (MessageWork("all_reduce", 1e6, LINE), 10 + 2 * 3 / 4 * 100 + 6 * 5),
        (MessageWork("all_reduce", 1e7, PAIRS), 10 + 2 * 7 / 8 * 1000 + 6 * 5 + 8 * 3),
        # Small ones go up and down a tree of 2 levels, each byte twice through a link.
        (MessageWork("all_reduce", 1e4, LINE), 10 + 2 * 1 + 2 * 2 * 5),
        (MessageWork("all_reduce", 1e4, PAIRS), 10 + 2 * 1 + 2 * (2 * 5 + 3)),
    ],
    ids=str,
)
def test_times_of_messages_that_were_worked_out_by_hand(
    work: MessageWork, microseconds: float
) -> None:
    assert message_s(round_cluster(), work) == pytest.approx(microseconds * 1e-6)


@pytest.mark.parametrize(("nodes", "slower"), [(2, 1.0), (3, 1.5), (4, 2.0)])
def test_each_node_after_the_second_slows_a_message_down(nodes: int, slower: float) -> None:
    cluster = with_fitted(round_cluster(), {"slowdown_per_node": 0.5})
    microseconds = 10 + slower * 100 + (nodes - 1) * 5
    work = MessageWork("broadcast", 1e6, LINE[:nodes])
    assert message_s(cluster, work) == pytest.approx(microseconds * 1e-6)


def test_groups_within_a_node_do_not_share_its_links() -> None:
    groups = (0, 1), (2, 5), (6, 7)
    assert [like_messages(round_cluster(), one, groups) for one in groups] == [1, 1, 1]
    groups = (0, 1), (2, 5), (3, 4)
    assert [like_messages(round_cluster(), one, groups) for one in groups] == [1, 2, 2]


def test_beyond_the_file_the_outermost_level_goes_on() -> None:
    """On more devices than the file describes a message takes no less time."""
    h100 = load_cluster("dgx-h100")
    node = h100.model_copy(update={"levels": h100.levels[:1]})
    inside, beyond = (
        message_s(node, MessageWork("all_reduce", 1e8, members)) for members in ((0, 1), (0, 8))
    )
    assert beyond == pytest.approx(inside, rel=0.05)
    frontera = load_cluster("frontera-rtx5000")
    last, after = (
        message_s(frontera, MessageWork("send", 1e8, (0, place)))
        for place in (frontera.size - frontera.node_size, frontera.size)
    )
    assert after >= last


def test_measured_tables_replace_the_formulas(selene: Cluster) -> None:
    tables = Tables(
        products=(
            ProductRow("float32", 1, 1, 64, 64, 64, "nn", 1e3),
            ProductRow("float32", 1, 1, 1024, 1024, 1024, "nn", 1e5),
        ),
        memory=(MemoryRow("add", "float32", 1, 1e3, 10), MemoryRow("add", "float32", 1, 1e6, 1e3)),
        messages=(
            MessageRow("broadcast", 1, 4, 1, 1, 1e3, 1e3),
            MessageRow("broadcast", 1, 4, 1, 1, 1e6, 1e4),
        ),
    )
    cluster = selene.model_copy(update={"tables": tables})
    work = product(1024, 1024, 1024, "float32")
    assert kernel_s(cluster, work) == pytest.approx(1e-1, rel=1e-3)
    assert kernel_s(cluster, KernelWork("memory", 0, 2e6)) == pytest.approx(2e-3)
    broadcast = MessageWork("broadcast", 1e6, (0, 1, 2, 3))
    assert message_s(cluster, broadcast) == pytest.approx(1e-2)
    assert message_s(cluster, broadcast._replace(bytes=10)) == pytest.approx(1e-3)


def test_unfused_attention_takes_longer_than_fused_and_its_backward_pass_twice_as_long(
    selene: Cluster,
) -> None:
    shape = (4, 8, 2048, 2048, 96, 1)
    flop = 2.0 * 4 * 8 * 2048 * 2048 * 96
    forward = KernelWork("attention", flop, 1e8, "float16", shape)
    backward = forward._replace(flop=2 * flop, op="attention_backward")
    device = selene.device.model_copy(update={"fused_attention": False})
    unfused = selene.model_copy(update={"device": device})
    assert kernel_s(unfused, forward) > 2 * kernel_s(selene, forward)
    again = 2.5  # which recomputes the scores
    assert kernel_s(selene, backward) == pytest.approx(again * kernel_s(selene, forward))
    assert 1.4 < kernel_s(unfused, backward) / kernel_s(unfused, forward) < 2.1


@pytest.mark.parametrize(("length", "fraction"), [(128, 1.0), (256, 0.75), (4096, 33 / 64)])
def test_fused_causal_attention_leaves_out_the_tiles_that_the_mask_hides(
    selene: Cluster, length: int, fraction: float
) -> None:
    fused = selene.model_copy(
        update={"device": selene.device.model_copy(update={"fused_attention": True})}
    )
    flop = 4.0 * 64 * 128 * length**2
    full = KernelWork("attention", flop, 1.0, "float16", (4, 16, length, length, 128, 0))
    causal = full._replace(shape=(4, 16, length, length, 128, 1))
    assert kernel_s(fused, causal) == pytest.approx(fraction * kernel_s(fused, full))
    if length > 512:  # of the tiles in the last 512 keys a query sees at most five
        window = full._replace(shape=(4, 16, length, length, 128, 512))
        assert kernel_s(fused, window) == pytest.approx(150 / 32**2 * kernel_s(fused, full))


@pytest.mark.parametrize(
    ("queries", "keys", "hides", "tiles"),
    [
        (512, 2048, 1, 13 + 14 + 15 + 16),  # of the 4 x 16 tiles of scores
        (256, 4096, 1, 31 + 32),
        (1024, 1024, 1, 36),
        (512, 2048, 128, 4 * 2),  # a window that begins within a tile
        (512, 2048, 0, 64),
    ],
)
def test_the_last_queries_see_all_keys_before_them(
    selene: Cluster, queries: int, keys: int, hides: int, tiles: int
) -> None:
    """So do times that were measured with as many queries as keys."""
    device = selene.device.model_copy(update={"fused_attention": True})
    square = AttentionRow("sdpa", "float16", 1, 1, 1, 1024, 1024, 64, True, False, 36.0)
    full = square._replace(causal=False, us=64.0)  # a microsecond for each tile
    tables = Tables(attention=(square, full))
    flop = 4.0 * 64 * queries * keys
    work = KernelWork("attention", flop, 1.0, "float16", (1, 1, queries, keys, 64, hides))
    fused = selene.model_copy(update={"device": device})
    all_of_it = kernel_s(fused, work._replace(shape=(1, 1, queries, keys, 64, 0)))
    n_tiles = queries * keys / 128**2
    assert kernel_s(fused, work) == pytest.approx(tiles / n_tiles * all_of_it)
    measured = fused.model_copy(update={"tables": tables})
    assert kernel_s(measured, work) == pytest.approx(tiles * 1e-6)


def test_a_window_takes_less_time_than_the_causal_mask_that_was_measured(selene: Cluster) -> None:
    rows = tuple(
        AttentionRow(op, "float16", 1, 1, 1, 4096, 4096, 64, True, False, us)
        for op, us in (("sdpa", 100.0), ("gridformer", 200.0))
    )
    measured = selene.model_copy(update={"tables": Tables(attention=rows)})

    def seconds(op: str, hides: int) -> float:
        shape = (1, 1, 4096, 4096, 64, hides)
        return kernel_s(measured, KernelWork("attention", 1.0, 1.0, "float16", shape, op))

    assert seconds("sdpa", 1) == pytest.approx(1e-4)
    assert seconds("attention", 1) == pytest.approx(2e-4)
    assert seconds("attention", 512) == pytest.approx(2e-4 * 150 / (32 * 33 / 2))


def test_a_message_between_nodes_keeps_a_thread_busy_as_long_as_one_within_a_node(
    selene: Cluster,
) -> None:
    inside = MessageRow("broadcast", 1, 4, 1, 1, 1e6, 2e3)
    between = MessageRow("broadcast", 1, 4, 2, 1, 1e6, 9e3)
    work = MessageWork("broadcast", 1e6, (0, 1, 8, 9))
    for rows, seconds in (((inside, between), 2e-3), ((between,), 0.0)):
        cluster = selene.model_copy(update={"tables": Tables(messages=rows)})
        assert message_s(cluster, work) == pytest.approx(9e-3)
        assert message_cpu_s(cluster, work) == pytest.approx(seconds)
        near = work._replace(members=(0, 1, 2, 3))
        assert message_cpu_s(cluster, near) == message_s(cluster, near)


def measured(m: int, us: float, processes: int = 1, order: str = "nn") -> ProductRow:
    return ProductRow("float32", processes, 1, m, m, m, order, us)  # type: ignore[arg-type]


def test_a_product_between_rows_has_a_rate_between_theirs() -> None:
    tables = Tables(products=(measured(64, 64**3 / 10), measured(1024, 1024**3 / 100)))
    assert tables.product_s(1, "float32", (1, 64, 64, 64)) == pytest.approx(64**3 / 10 / 1e6)
    between = tables.product_s(1, "float32", (1, 256, 256, 256))
    assert between is not None
    assert 10 < 256**3 / between / 1e6 < 100
    assert tables.product_s(1, "bfloat16", (1, 64, 64, 64)) is None


def test_an_unknown_order_takes_the_mean_over_orders() -> None:
    tables = Tables(products=(measured(64, 10.0), measured(64, 30.0, order="tn")))
    assert tables.product_s(1, "float32", (1, 64, 64, 64), "tn") == pytest.approx(30e-6)
    assert tables.product_s(1, "float32", (1, 64, 64, 64)) == pytest.approx(20e-6)


def test_the_slowdown_of_many_processes_applies_to_shapes_measured_with_few() -> None:
    rows = (measured(64, 10.0), measured(512, 100.0), measured(64, 40.0, processes=8))
    tables = Tables(products=rows)
    assert tables.product_s(8, "float32", (1, 512, 512, 512)) == pytest.approx(400e-6)
    assert tables.product_s(16, "float32", (1, 512, 512, 512)) == pytest.approx(800e-6)


def test_kernels_that_were_not_measured_take_the_time_of_an_addition() -> None:
    rows = (
        MemoryRow("add", "float32", 1, 1e3, 1.0),
        MemoryRow("add", "float32", 1, 1e5, 100.0),
        MemoryRow("gelu", "float32", 1, 1e3, 7.0),
    )
    tables = Tables(memory=rows)
    assert tables.memory_s(1, "gelu", 1e3) == pytest.approx(7e-6)
    assert tables.memory_s(1, "sin", 1e4) == pytest.approx(10e-6)
    assert tables.memory_s(1, "add", 1e6) == pytest.approx(1e-3)
    assert Tables().memory_s(1, "add", 1e6) is None
    both = Tables(memory=(*rows, MemoryRow("gelu", "bfloat16", 1, 1e3, 9.0)))
    assert both.memory_s(1, "gelu", 1e3, "bfloat16") == pytest.approx(9e-6)
    assert both.memory_s(1, "gelu", 1e3, "int64") == pytest.approx(7e-6)


def test_messages_between_sizes_members_and_numbers_of_processes() -> None:
    rows = (
        MessageRow("broadcast", 4, 4, 1, 1, 1e3, 10.0),
        MessageRow("broadcast", 4, 4, 1, 1, 1e5, 1000.0),
        MessageRow("broadcast", 16, 4, 1, 1, 1e5, 4000.0),
        MessageRow("broadcast", 16, 16, 2, 3, 1e5, 9000.0),
    )
    tables = Tables(messages=rows)
    assert tables.message_s(4, "broadcast", 4, 1, 1, 1e4) == pytest.approx(100e-6)
    assert tables.message_s(8, "broadcast", 4, 1, 1, 1e5) == pytest.approx(2000e-6)
    assert tables.message_s(16, "broadcast", 16, 2, 3, 1e5) == pytest.approx(9000e-6)
    assert tables.message_s(16, "broadcast", 16, 2, 1, 1e5) is None
    assert tables.message_s(4, "reduce", 4, 1, 1, 1e4) is None


def test_empty_tensors_take_no_more_than_small_ones() -> None:
    memory = tuple(
        MemoryRow("add", "float32", n, size, n * size / 1e3)
        for n, sizes in ((1, (1e3, 1e5)), (8, (1e3,)))
        for size in sizes
    )
    tables = Tables(memory=memory, products=(measured(64, 10.0), measured(64, 40.0, processes=8)))
    assert tables.memory_s(8, "add", 0) == tables.memory_s(8, "add", 1) == pytest.approx(4e-6)
    assert tables.product_s(8, "float32", (1, 64, 0, 64)) == 0
