"""The largest layout that tests plan, check and estimate: gpt-175b on 4,096 ranks."""

from gridformer.config import RunConfig, parse_run

# As on the command line.
WORDS = [
    *("gpt-175b", "layout.scheme=optimus", "layout.rows=8", "layout.cols=8", "layout.dp=4"),
    *("layout.pp=16", "layout.micro_batches=64", "train.global_batch=2048"),
    *("train.dtype=bfloat16", "train.recompute=full"),
]


def gpt_175b() -> RunConfig:
    return parse_run({"model": "gpt-175b", "data": {"path": "none"}}, WORDS[1:])
