"""The description of the service: the schema of requests, and a page that loads nothing else."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from otad.serve.served import ServedModel

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color-scheme: light dark; }
table { border-collapse: collapse; } td { padding: 0.2rem 1rem 0.2rem 0; }
pre { overflow-x: auto; border: 1px solid; padding: 1rem; }
"""


def request_of(served: ServedModel) -> dict[str, Any]:
    """Return the schema of the body of a request, with an example of one row."""
    tensor = {"type": "object", "required": ["name", "shape", "datatype"]}
    schema = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": {"type": "array", "items": tensor},
            "outputs": {"type": "array", "items": {"type": "object", "required": ["name"]}},
            "parameters": {"type": "object"},
        },
    }
    content = {"application/json": {"schema": schema, "example": example_of(served)}}
    content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    return {"requestBody": {"required": True, "content": content}}


def example_of(served: ServedModel) -> dict[str, Any]:
    """Return a request of one row, with "..." for its numbers."""
    inputs = [
        {**tensor.to_dict(), "shape": [1, *tensor.shape[1:]], "data": ["..."]}
        for tensor in served.inputs
    ]
    return {"id": "1", "inputs": inputs, "outputs": [{"name": name} for name in served.usual]}


def page_of(schema: dict[str, Any]) -> str:
    """Return a page that lists the paths of an OpenAPI schema."""
    rows, example = [], ""
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            cells = f"<code>{method.upper()} {escape(path)}</code>", escape(about["summary"])
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
            body = about.get("requestBody", {}).get("content", {}).get("application/json", {})
            example = example or json.dumps(body.get("example", ""), indent=1).strip('"')
    title = escape(schema["info"]["title"])
    head = f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
    size = "<meta name='viewport' content='width=device-width'>"
    table = f"<table>{''.join(rows)}</table>"
    text = "The machine-readable form is <a href='openapi.json'>openapi.json</a>. A request:"
    body = f"<h1>{title}</h1>{table}<p>{text}</p><pre>{escape(example)}</pre>"
    return f"{head}{size}<style>{STYLE}</style></head><body>{body}</body></html>\n"
