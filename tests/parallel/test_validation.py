"""The rules that a layout imposes on a model and a batch, one by one."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import gridformer
from gridformer.config import LayoutConfig, RunConfig, schemes
from gridformer.parallel.registry import spec_of, specs
from gridformer.parallel.validation import check_layout, problems
from gridformer.utils.errors import ConfigError
from tests.support.fixes import changed, rules, run_of

# Settings, those of the layout without its name, and how the sentence about them begins.
WRONG = """
scheme=megatron cols=8
    model.n_heads=12 does not divide over layout.cols=8: use layout.cols=1
scheme=optimus rows=5 train.global_batch=25 model.ffn_size=200
    model.hidden_size=48 does not divide over layout.rows=5: use layout.rows=1
scheme=megatron cols=4 sequence_parallel=true data.seq_len=22
    data.seq_len=22 does not divide over layout.cols=4: use layout.cols=1
scheme=optimus rows=2 dp=2 rows_over=batch train.global_batch=10
    train.global_batch=10 does not divide over layout.dp (2) x layout.rows (2): use
    train.global_batch=8 or 12, or layout.rows_over=sequence
scheme=optimus rows=2 train.global_batch=1 data.seq_len=22
    train.global_batch=1 does not divide over layout.rows (2): use train.global_batch=2 or 4, or
    data.seq_len=20
scheme=megatron_2d rows=4 cols=3 rows_over=sequence data.seq_len=12
    data.seq_len=12 does not divide into the 24 parts of layout.rows_over=sequence on megatron_2d
    4x3: use data.seq_len=24, or layout.rows_over=batch
dp=3 micro_batches=5 train.global_batch=10
    train.global_batch=10 does not divide over layout.dp (3) x layout.micro_batches (5): use
    train.global_batch=15
data.seq_len=25
    data.seq_len=25 is longer than model.max_seq_len=24: use data.seq_len=24, or
    model.max_seq_len=25
pp=4
    layout.pp=4 x layout.stages_per_rank=1: more stages than layers, embeddings and heads (3):
    use layout.pp=3
stages_per_rank=2
    layout.stages_per_rank=2 needs a pipeline, but layout.pp=1 has none: use
    layout.stages_per_rank=1
pipeline=1f1b
    layout.pipeline=1f1b needs a pipeline, but layout.pp=1 has none: use layout.pipeline=auto
pp=3 pipeline=1f1b micro_batches=2
    layout.pipeline=1f1b needs at least as many micro-batches as layout.pp=3 stages, not
    layout.micro_batches=2: use layout.pipeline=auto, or layout.micro_batches=3
train.attention=flash train.device=cpu
    train.attention=flash: on train.device=cpu PyTorch chooses by itself: use train.attention=auto
train.attention=flash
    train.attention=flash: it does not take train.dtype=float32: use train.attention=efficient
train.attention=cudnn train.dtype=bfloat16 model.head_dim=8 rows=2 scheme=optimus rows_over=sequence
    train.attention=cudnn: layout.rows_over=sequence needs the last queries of causal attention: use
    train.attention=flash
train.attention=cudnn train.dtype=bfloat16 model.head_dim=8 train.deterministic=true
    train.attention=cudnn: its gradients differ from run to run, despite train.deterministic=true:
    use train.attention=flash
train.attention=cudnn train.dtype=bfloat16 model.head_dim=12
    train.attention=cudnn: heads of 12 elements are wider than 128 or no multiple of 8: use
    train.attention=flash
train.attention=flash train.dtype=bfloat16 model.head_dim=264
    train.attention=flash: heads of 264 elements are wider than 256: use train.attention=efficient
train.attention=efficient train.dtype=float32 model.head_dim=6
    train.attention=efficient: heads of 6 elements are no multiple of 16 bytes: use
    train.attention=auto
train.attention=flash4 train.dtype=bfloat16 train.kernels=torch data.document_mask=true
    train.attention=flash4: it does not take the masks of train.kernels=torch: use
    train.attention=auto
pp=2 pipeline=interleaved
    layout.pipeline=interleaved needs several stages per rank, not layout.stages_per_rank=1: use
    layout.pipeline=auto
pp=2 pipeline=zb_h1 micro_batches=2 train.update=in_backward train.clip_by=layer
    layout.pipeline=zb_h1 computes gradients of weights after their backward pass, which does not
    work with train.update=in_backward: use layout.pipeline=auto, or train.update=after_backward
pp=3 pipeline=zb_h1 micro_batches=2
    layout.pipeline=zb_h1 needs at least as many micro-batches as layout.pp=3 stages, not
    layout.micro_batches=2: use layout.pipeline=auto, or layout.micro_batches=3
pp=2 pipeline=zbv micro_batches=2 model.n_layers=3
    layout.pipeline=zbv has two stages per rank, not layout.stages_per_rank=1: use
    layout.pipeline=auto, or layout.stages_per_rank=2
pp=2 stages_per_rank=2 pipeline=zbv model.n_layers=3
    layout.pipeline=zbv needs at least as many micro-batches as layout.pp=2 stages, not
    layout.micro_batches=1: use layout.pipeline=auto, or layout.micro_batches=2
pp=2 stages_per_rank=2 pipeline=gpipe model.n_layers=3 micro_batches=4
    layout.pipeline=gpipe has one stage per rank, not layout.stages_per_rank=2: use
    layout.pipeline=auto, or layout.stages_per_rank=1
pp=2 stages_per_rank=2 micro_batches=5 model.n_layers=3 train.global_batch=60
    layout.micro_batches=5 cannot form equal rounds of at least layout.pp=2 micro-batches, which
    interleaved stages need: use layout.micro_batches=4, or layout.stages_per_rank=1
cols=2
    layout.scheme=single uses no grid and cannot use layout.cols=2: use layout.cols=1, or
    layout.scheme=megatron, megatron_2d or optimus
scheme=megatron rows=2 cols=3
    layout.scheme=megatron uses layout.cols and cannot use layout.rows=2: use layout.rows=1 and
    layout.cols=6, or layout.scheme=megatron_2d or optimus
scheme=megatron branches=4
    layout.scheme=megatron uses layout.cols and cannot use layout.branches=4: use
    layout.branches=1 and layout.cols=4, or layout.scheme=subgraph
scheme=subgraph branches=4 rows=2 cols=2
    layout.scheme=subgraph uses layout.branches and cannot use layout.rows=2 and layout.cols=2:
    use layout.rows=1 and layout.cols=1, or layout.scheme=megatron_2d and layout.branches=1, or
    layout.scheme=optimus and layout.branches=1
scheme=optimus sequence_parallel=true
    layout.sequence_parallel=true does not apply to optimus with stationary=auto: use
    layout.sequence_parallel=false
scheme=subgraph branches=8
    model.n_heads=12 does not divide over layout.branches=8: use layout.branches=1, 2, 3, 4, 6
    or 12, or model.n_heads=8 or 16
scheme=subgraph branches=2 rows=2 cols=3
    layout.scheme=subgraph uses layout.branches and cannot use layout.rows=2 and layout.cols=3:
    use layout.rows=1 and layout.cols=1 and layout.branches=6, or layout.scheme=megatron_2d and
    layout.branches=1, or layout.scheme=optimus and layout.branches=1
branches=2
    layout.scheme=single uses no grid and cannot use layout.branches=2: use layout.branches=1,
    or layout.scheme=subgraph
scheme=megatron common=first
    layout.common=first belongs to scheme=subgraph, not megatron: use layout.common=all
scheme=subgraph branches=2 keep_gathered=weights
    layout.keep_gathered=weights does not apply to subgraph, 2 branches: use
    layout.keep_gathered=auto, inputs or none
dp_mode=fsdp
    layout.dp_mode=fsdp shards state over replicas, but layout.dp=1 has only one: use
    layout.dp_mode=replicate
scheme=optimus rows=6 cols=12 dp=2 devices_per_node=7 model.ffn_size=48
    layout.devices_per_node=7 does not divide rows x cols x dp x pp=144: use
    layout.devices_per_node=6, 8 or 9
scheme=optimus rows=4 cols=4 devices_per_node=4 nodes_per_rack=3
    layout.nodes_per_rack=3 does not divide the number of nodes, 4: use layout.nodes_per_rack=
cluster=dgx-h10
    layout.cluster=dgx-h10 is not a shipped cluster, and there is no such file: use
    layout.cluster=dgx-h100
scheme=optimus stationary=weight schedule=gather
    layout.schedule=gather does not apply to optimus with stationary=weight: use
    layout.schedule=auto
scheme=optimus stationary=weight cols=2 train.global_batch=3
    train.global_batch=3 does not divide over layout.cols (2): use train.global_batch=2 or 4, or
    layout.sequence_parallel=true
dp=2 experts_over=[dp]
    layout.experts_over=[dp]: the model has no experts: use layout.experts_over=[]
scheme=optimus rows=8 train.optimizer=muon train.muon_by_head=true
    train.muon_by_head=true: layout.rows=8 may divide one of model.n_heads=12 heads: use
    train.muon_by_head=false
nodes_per_rack=2
    layout.nodes_per_rack=2 needs layout.devices_per_node, which is 0: use layout.nodes_per_rack=0
"""


MIXTURE = {"model.family": "llama", "model.n_experts": 4, "model.experts_per_token": 1}
# The same about layouts of a mixture of experts.
WRONG_WITH_EXPERTS = """
scheme=megatron cols=2 experts_over=[rows]
    layout.experts_over=[rows]: scheme=megatron has no rows: use
dp=4 experts_over=[dp] experts_dp=3
    layout.experts_dp=3 does not divide layout.dp=4 into equal groups: use
dp=4 experts_dp=2
    layout.experts_dp=2 needs dp in layout.experts_over: use layout.experts_dp=0
dp=4 dp_mode=fsdp shard_over=2 experts_over=[dp]
    layout.shard_over=2 and dp in layout.experts_over both divide the replicas into groups: use
    layout.shard_over=0, or layout.experts_over=[]
scheme=megatron cols=4 model.expert_size=66
    model.expert_size=66 does not divide over layout.cols=4: use layout.experts_over=[cols], or
    model.expert_size=
scheme=subgraph branches=2 dp=2 feed_forward=common experts_over=[dp]
    layout.experts_over=dp needs layout.feed_forward=branched, or branches as well: use
    layout.feed_forward=branched, or layout.experts_over=[]
"""


def table(text: str) -> Iterator[tuple[dict[str, Any], str]]:
    for settings, said in re.findall(r"^(\w.*)\n((?:    .*\n)+)", text, re.MULTILINE):
        pairs = (word.split("=") for word in settings.split())
        changes = {k if "." in k else f"layout.{k}": yaml.safe_load(v) for k, v in pairs}
        yield changes, " ".join(said.split())


OF_EXPERTS = [(changes | MIXTURE, text) for changes, text in table(WRONG_WITH_EXPERTS)]


@pytest.mark.parametrize(("changes", "text"), [*table(WRONG), *OF_EXPERTS], ids=str)
def test_one_rule_broken(changes: dict[str, Any], text: str) -> None:
    run = run_of(**changes)
    (only,) = problems(run)
    assert str(only).startswith(text)
    with pytest.raises(ConfigError) as error:
        check_layout(run)
    assert error.value.problems == [str(only)]
    for offer in only.changes:
        check_layout(changed(run, offer))


@pytest.mark.parametrize(("batch", "over"), [(4, "auto"), (2, "sequence"), (6, "sequence")])
def test_rows_divide_sequences_that_they_cannot_share_out(batch: int, over: str) -> None:
    run = run_of(**{"layout.scheme": "optimus", "layout.rows": 2, "layout.dp": 2})
    run = changed(run, {"train.global_batch": batch})
    assert check_layout(run).layout.rows_over == over
    plain = changed(run, {"layout.rows_over": "batch"})
    assert rules(plain) == (set() if over == "auto" else {"batch"})


def test_all_problems_at_once() -> None:
    """Report the problems of the shape, the model, the batch and the sequence together."""
    changes = {
        **{"layout.scheme": "megatron", "layout.rows": 2, "layout.cols": 5, "layout.pp": 9},
        **{"layout.dp": 7, "layout.sequence_parallel": True, "data.seq_len": 99},
    }
    assert rules(run_of(**changes)) == {
        "axes", "stages", "cols cuts model.n_heads", "cols cuts model.ffn_size",
        "cols cuts data.seq_len", "batch", "length",
    }  # fmt: skip


def test_a_first_sub_grid_alone_shares_no_samples_over_branches() -> None:
    """Rules about the feed-forward and samples apply only to layouts that shard them."""
    odd = {"layout.scheme": "subgraph", "layout.branches": 4, "train.global_batch": 7}
    assert rules(run_of(**odd)) == {"batch"}
    assert problems(run_of(**odd, **{"layout.common": "first"})) == []
    odd |= {"layout.common": "first", "model.ffn_size": 50}
    assert len(problems(run_of(**odd))) == 1
    assert problems(run_of(**odd, **{"layout.feed_forward": "common"})) == []


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ({"dp": 3}, 3),
        ({"scheme": "megatron", "cols": 4, "dp": 2}, 2),
        ({"scheme": "megatron_2d", "rows": 2, "rows_over": "batch", "dp": 3}, 6),
        ({"scheme": "optimus", "rows": 2, "rows_over": "batch", "dp": 2}, 4),
        ({"scheme": "optimus", "rows": 2, "rows_over": "sequence", "dp": 2}, 2),
        ({"scheme": "subgraph", "branches": 4, "dp": 2}, 8),
        ({"scheme": "subgraph", "branches": 4, "dp": 2, "common": "first"}, 2),
    ],
    ids=str,
)
def test_micro_batches_divide_over_this_number_of_devices(
    layout: dict[str, Any], parts: int
) -> None:
    """`batch_parts` is what the rule about `global_batch` demands of each micro-batch."""
    plan = LayoutConfig(**layout, micro_batches=2)
    assert spec_of(plan).batch_parts(plan) == parts
    for batch in range(1, 4 * parts + 1):
        values = {"train.global_batch": batch, "layout.micro_batches": 2}
        broken = rules(run_of(**values, **{f"layout.{key}": x for key, x in layout.items()}))
        assert ("batch" in broken) == (batch % (2 * parts) != 0), batch


@pytest.mark.parametrize("scheme", schemes())
def test_what_a_scheme_does_not_cut_need_not_divide(scheme: str) -> None:
    """One replica on one device accepts anything; rows only matter to Optimus."""
    odd = {"model.hidden_size": 35, "model.n_heads": 5, "model.ffn_size": 11}
    odd |= {"data.seq_len": 23, "train.global_batch": 7}
    assert problems(run_of(**odd, **{"layout.scheme": scheme})) == []
    assert problems(run_of(**odd, **{"layout.scheme": scheme, "layout.dp": 7})) == []


def pooled(**changes: Any) -> RunConfig:
    """Return a run whose heads and feed-forward divide by 4 columns, but not the pooler's h."""
    model = {"model.hidden_size": 30, "model.n_heads": 4, "model.head_dim": 6, "model.ffn_size": 64}
    return run_of(**{**model, "layout.scheme": "megatron", "layout.cols": 4, **changes})


def test_a_pooler_is_sharded_over_columns() -> None:
    """The poolers for sentence pairs and for labels shard h; without them nothing does."""
    assert rules(pooled()) == set()
    assert rules(pooled(**{"model.n_labels": 3})) == {"cols cuts model.hidden_size"}
    bert = {"model.family": "bert"}
    assert rules(pooled(**bert)) == {"cols cuts model.hidden_size"}
    assert rules(pooled(**bert, **{"model.sentence_pair": False})) == set()
    (problem,) = problems(pooled(**bert))
    sizes = {"layout.cols": [1, 2], "model.hidden_size": [28, 32]}
    assert [*problem.changes] == [{key: n} for key, some in sizes.items() for n in some]
    grid = {"layout.scheme": "megatron_2d", "layout.rows": 2}
    assert rules(pooled(**grid)) == set()
    assert rules(pooled(**grid, **bert)) == {"cols cuts model.hidden_size"}


def test_schemes_are_read_without_torch() -> None:
    """Validation runs in the command line, where importing torch would dominate the time."""
    code = "import sys, gridformer.memory.layouts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_keys_of_schemes_are_keys_of_layouts() -> None:
    keys = {key for spec in specs().values() for key in (*spec.axes, *spec.keys)}
    assert keys < LayoutConfig.model_fields.keys()


def test_nobody_but_their_specs_compares_names_of_schemes() -> None:
    """Other code asks the spec if it needs to know something about a scheme."""
    for path in Path(gridformer.__file__).parent.rglob("*.py"):
        found = re.findall(r"scheme (?:==|in|!=)|match .*scheme", path.read_text())
        assert not found, path
