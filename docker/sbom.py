"""The software bill of materials of an environment: what is installed in it, as CycloneDX 1.6 in JSON.

    /opt/espalier/bin/python docker/sbom.py espalier-service-cpu > sbom.cdx.json

Lists the distributions of the Python that runs it, their licences, who needs whom, and Python itself. Does not know packages of the
operating system below, nor what wheels carry along inside; the tools that look through a whole image find those. The same environment gives
the same document: it has no time and no random number in it.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import uuid
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any


def bill(name: str, distributions: Iterable[metadata.Distribution]) -> dict[str, Any]:
    """The document about what is called `name` and consists of these distributions."""
    found: dict[str, metadata.Distribution] = {}
    for one in distributions:
        found.setdefault(normal(one.metadata["Name"]), one)  # the first is what Python imports
    references = {key: f"pkg:pypi/{key}@{one.version}" for key, one in sorted(found.items())}
    python = f"pkg:generic/python@{platform.python_version()}"
    components = [_component(references[key], found[key]) for key in references]
    components.append({"type": "platform", "bom-ref": python, "name": "python", "version": platform.python_version(), "purl": python})
    needs = [{"ref": references[key], "dependsOn": _needs(found[key], references)} for key in references]
    root = {"type": "application", "bom-ref": name, "name": name}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": components,
        "dependencies": [{"ref": name, "dependsOn": [*references.values(), python]}, *needs, {"ref": python, "dependsOn": []}],
    }
    return document | {"serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))}"}


def _component(reference: str, one: metadata.Distribution) -> dict[str, Any]:
    fields = one.metadata.json
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference,
        "name": fields["name"],
        "version": one.version,
        "purl": reference,
    }
    if fields.get("summary"):
        component["description"] = fields["summary"]
    licences = _licences(fields)
    return component | ({"licenses": licences} if licences else {})


def _licences(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An SPDX expression where the metadata has one, else names: those of the classifiers, or a short text."""
    if fields.get("license_expression"):
        return [{"expression": fields["license_expression"]}]
    classified = [line.rpartition(" :: ")[2] for line in fields.get("classifier", []) if line.startswith("License :: OSI")]
    text = fields.get("license", "").strip()
    named = classified or ([text] if text and len(text) < 100 and "\n" not in text else [])
    return [{"license": {"name": name}} for name in dict.fromkeys(named)]


def _needs(one: metadata.Distribution, references: dict[str, str]) -> list[str]:
    """What of the environment a distribution asks for, extras of its own left out."""
    lines = [line for line in one.requires or [] if not re.search(r"\bextra\b", line.partition(";")[2])]
    names = {normal(re.split(r"[\s\[<>=!~;@(]", line, maxsplit=1)[0]) for line in lines}
    return [references[name] for name in sorted(names & references.keys())]


def normal(name: str) -> str:
    """The name as indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a CycloneDX document about the environment of this Python.")
    parser.add_argument("name", help="what the environment is for")
    print(json.dumps(bill(parser.parse_args().name, metadata.distributions()), indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
