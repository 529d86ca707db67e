"""The config's JSON Schema, for Snakemake's `validate` and for editors: `python -m flexroll.schema.export > FILE`."""

from __future__ import annotations

import json

from flexroll.schema.config import Config


def config_schema() -> str:
    """JSON Schema (draft 2020-12) of config.yaml as text that ends with a newline."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    print(config_schema(), end="")
