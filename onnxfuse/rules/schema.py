"""``rules/rule.schema.json``: generated from the models of the format, for editors and other tools."""

from __future__ import annotations

import json

from onnxfuse.rules.spec import RuleFile


def text() -> str:
    """The JSON schema of a rule file, as it is committed."""
    schema = RuleFile.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "onnxfuse rule"
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"
