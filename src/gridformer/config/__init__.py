"""Frozen, validated descriptions of a run: model, layout, data, training.

A run file is YAML with the sections `model`, `layout`, `data` and `train`. `load_run` reads one,
applies `dotted.key=value` overrides, and checks everything that can be checked without the data. It
reports all problems at once in a `ConfigError`, each with a value that works.
`gridformer.parallel.validation.check_layout` then checks the layout against the model.
"""

from gridformer.config.base import Config, any_of, closest, divisors
from gridformer.config.data import FINE_TUNING, NO_PATH, TASKS, DataConfig, Task
from gridformer.config.layout import LayoutConfig, PipelineOrder, schemes
from gridformer.config.model import ENCODER_DECODER, Family, ModelConfig, RopeScaling
from gridformer.config.reading import (
    configs_dir,
    find_run_file,
    load_run,
    model_names,
    parse_run,
    shipped_model,
)
from gridformer.config.run import RunConfig
from gridformer.config.train import TrainConfig

__all__ = [
    "ENCODER_DECODER",
    "FINE_TUNING",
    "NO_PATH",
    "TASKS",
    "Config",
    "DataConfig",
    "Family",
    "LayoutConfig",
    "ModelConfig",
    "PipelineOrder",
    "RopeScaling",
    "RunConfig",
    "Task",
    "TrainConfig",
    "any_of",
    "closest",
    "configs_dir",
    "divisors",
    "find_run_file",
    "load_run",
    "model_names",
    "parse_run",
    "schemes",
    "shipped_model",
]
