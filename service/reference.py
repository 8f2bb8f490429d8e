"""The page of settings, routes and metrics, from the code that defines them: `python -m service.reference > docs/reference.md`."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from .http.routes import _routes
from .settings import PREFIX, Settings
from .watch.metric_table import COUNTERS, GAUGES, HISTOGRAMS

COMMON_MAXIMA = (86_400, 3_600_000)
"""A day in seconds and an hour in milliseconds, which the page's introduction says once for all."""
PAGES = (
    ("GET", "/", "none", "The console, a page for people; its files are below `/console/`."),
    ("GET", "/docs", "none", "Interactive documentation, which loads nothing from other hosts."),
    ("GET", "/openapi.json", "none", "OpenAPI, as [openapi.json](openapi.json)."),
)
"""(method, path, role, answer) of the routes that OpenAPI leaves out."""


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m service.reference", description="Print docs/reference.md.").parse_args(arguments)
    print(as_markdown(), end="")


def as_markdown() -> str:
    """docs/reference.md."""
    lines = [
        "# Reference",
        "",
        "Settings, routes and metrics of the service. This page is generated: `python -m service.reference > docs/reference.md`.",
        "",
        "## Settings",
        "",
        "Environment variables; `--host`, `--port` and `--workers` win over theirs. The service refuses to start with an invalid setting.",
        "The message gives its name, its value and what was expected. An unknown variable `ESPALIER_…` is logged as a warning with the",
        "nearest setting. If it looks like keys, TLS or the admin address, the service does not start, because it would protect nothing.",
        "Variables that Kubernetes sets for a Service `espalier` are ignored. Seconds are at most 86,400, milliseconds at most 3,600,000.",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
        *(_setting(name, schema) for name, schema in Settings.model_json_schema()["properties"].items()),
        "",
        "## Routes",
        "",
        "[openapi.json](openapi.json) has their parameters, bodies, answers and statuses; [Keys](serve.md#keys) explains the roles.",
        "",
        "| route | role | answer |",
        "|---|---|---|",
        *(f"| `{method} {path}` | {role} | {answer} |" for method, path, role, answer in (*_answers(), *PAGES)),
        "",
        "## Metrics",
        "",
        "`GET /metrics`, summed over the workers. Buckets of seconds are geometric from 15 µs.",
        "",
        "| metric | labels | meaning |",
        "|---|---|---|",
        *(
            f"| `{name}` | {', '.join(row.labels) or 'none'} | {row.help} |"
            for name, row in sorted((COUNTERS | GAUGES | HISTOGRAMS).items())
        ),
    ]
    return "\n".join(lines) + "\n"


def _answers() -> Iterator[tuple[str, str, str, str]]:
    """(method, path, role, answer) of the routes of OpenAPI: how its description of each begins."""
    for route in _routes():
        description = inspect.getdoc(route.function) or ""
        answer = re.split(r"[.:;](?:\s|$)", description, maxsplit=1)[0]
        yield route.method, re.sub(r":\w+}", "}", route.path), route.access or "none", f"{answer}."


def _setting(name: str, schema: dict[str, Any]) -> str:
    field = Settings.model_fields[name]
    limits = schema.get("anyOf", [schema])[0]
    allowed = f" One of {', '.join(f'`{value}`' for value in limits['enum'])}." if "enum" in limits else ""
    most = limits.get("maximum")
    if most is not None and most not in COMMON_MAXIMA:
        allowed += f" At most {most:,}."
    return f"| `{PREFIX}{name.upper()}` | {_default(field.default)} | {field.description}{allowed} |"


def _default(value: object) -> str:
    """A default as the environment has it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    main()
