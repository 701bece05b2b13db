"""The JSON schema of run files, by which editors complete and check them."""

from __future__ import annotations

from typing import Any

from gridformer.config.reading import model_names
from gridformer.config.run import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def run_schema() -> dict[str, Any]:
    """Returns the schema of what `load_run` reads: a model may be named, and `name` left out."""
    schema = RunConfig.model_json_schema()
    model = schema["$defs"]["ModelConfig"]
    # With a name, a function or a folder the shape of the model is known.
    known = [{"required": [key]} for key in ("name", "factory", "folder")]
    model["anyOf"] = [{"required": model.pop("required")}, *known]
    model["properties"]["name"]["examples"] = model_names()
    named = {"type": "string", "examples": model_names()}
    schema["properties"]["model"] = {
        "anyOf": [named, schema["properties"]["model"]],
        "description": "The model: the name of a shipped one, the path of a run directory or of a "
        "Hugging Face folder, package.module:function, or a section with keys of its own.",
    }
    sources = schema["$defs"]["DataConfig"]["properties"]["sources"]
    data = {"type": "array", "items": sources["items"], "description": sources["description"]}
    schema["properties"]["data"] = {"anyOf": [schema["properties"]["data"], data]}
    schema["required"] = ["data"]  # train.init_from brings a model
    return {"$schema": DIALECT, **schema, "title": "A run file of gridformer"}
