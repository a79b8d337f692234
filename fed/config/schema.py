"""JSON schemas of experiments and comparisons, by which editors complete and check their files."""

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from fed.config.document import Document

__all__ = ["schema_of", "schema_text"]


def schema_of(document: type[Document]) -> dict[str, Any]:
    """The schema of a document, with every built-in kind, its keys and their defaults.

    Example:
        >>> from fed.config.experiment import Local
        >>> schema_of(Local)["properties"]["batch_size"]["default"]
        16
    """
    schema = document.model_json_schema(schema_generator=_Generator)
    # The rest of the docstring explains Python, which an editor of YAML need not show.
    schema["description"] = schema["description"].partition("\n")[0]
    return {"$schema": _Generator.schema_dialect, **schema}


def schema_text(document: type[Document]) -> str:
    """The schema as JSON, as it stands beside the examples."""
    return json.dumps(schema_of(document), indent=2, ensure_ascii=False) + "\n"


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # a title made of the key says nothing that the key does not

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        if "default_factory" in schema and not schema.get("default_factory_takes_data"):
            schema = {**schema, "default": schema["default_factory"]()}  # type: ignore[call-arg]  # it takes no data
        return super().default_schema(schema)
