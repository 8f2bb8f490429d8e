"""The service under load: its address, single requests outside the measurements, and its description of a model.

Knows URLs and the service's answers. Does not know queries or clocks.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from espalier.errors import EspalierError, InvalidConfig

Json = dict[str, Any]


class ServiceRefused(EspalierError):
    """The service is unreachable, or it refuses a request that would be refused every time."""


@dataclass(frozen=True)
class Target:
    """A service at http://HOST:PORT/PREFIX."""

    host: str
    port: int
    prefix: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"http://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """HOST:PORT for a Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


def parse_url(url: str, key: str | None = None) -> Target:
    """The service that a URL names; `key` is sent with every request. Raises InvalidConfig."""
    split_url = urlsplit(url)
    expected = "http://HOST:PORT of the service itself"
    if split_url.scheme == "https":
        raise InvalidConfig("--url", url, f"{expected}: TLS is not spoken here, and a proxy would be measured with it")
    try:
        port = split_url.port
    except ValueError:
        raise InvalidConfig("--url", url, f"{expected}, with a port from 1 to 65535") from None
    if split_url.scheme != "http" or not split_url.hostname or split_url.query or split_url.fragment or split_url.username:
        raise InvalidConfig("--url", url, expected)
    if key is not None and (not key.isascii() or not key.isprintable()):
        raise InvalidConfig("--key", "a key with other characters", "printable ASCII characters")
    return Target(split_url.hostname, port or 80, split_url.path.rstrip("/"), {"Authorization": f"Bearer {key}"} if key else {})


def exchange(target: Target, method: str, path: str, body: bytes | None, media_type: str, timeout_s: float = 60) -> tuple[int, bytes]:
    """Status and body of the answer to one request on a new connection. Raises ServiceRefused if no HTTP server answers."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    try:
        headers = {**target.headers, **({"Content-Type": media_type} if body is not None else {})}
        connection.request(method, target.prefix + path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise ServiceRefused(
            f"{method} {target}{path}: no answer ({error or type(error).__name__}); is the service running there?"
        ) from error
    finally:
        connection.close()


def send(target: Target, method: str, path: str, body: object = None, timeout_s: float = 60) -> tuple[int, Json]:
    """Status and JSON object of the answer to one request. Raises ServiceRefused if no HTTP server answers with a JSON object."""
    request_body = None if body is None else json.dumps(body).encode()
    status, content = exchange(target, method, path, request_body, "application/json", timeout_s)
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ServiceRefused(f"{method} {target}{path}: {status} without a JSON object; is that a retrieval service?")
    return status, document


def ask(target: Target, method: str, path: str, body: object = None, timeout_s: float = 60) -> Json:
    """The answer to a request that must succeed. Raises ServiceRefused with the service's problem."""
    status, document = send(target, method, path, body, timeout_s)
    if status != 200:
        raise ServiceRefused(f"{method} {target}{path}: {problem_text(status, document)}")
    return document


def problem_text(status: int, document: Json) -> str:
    """A problem document in one line, with its invalid fields."""
    entries = document.get("errors") or ()
    got = [f"got {entry['value']}, expected" if "value" in entry else "is missing; expected" for entry in entries]
    text = "; ".join(f"{entry.get('field')}: {words} {entry.get('expected')}" for entry, words in zip(entries, got, strict=True)) or str(
        document.get("detail") or document.get("title") or document
    )
    hint = {401: " (--key)", 403: " (--key)"}.get(status, "")
    return f"{status}, {text}{hint}"


def describe(target: Target, name: str | None) -> Json:
    """The document of GET /models/{name} of a ready model; without a name, of the only model. Raises ServiceRefused or InvalidConfig."""
    if name is None:
        names = [str(model["name"]) for model in ask(target, "GET", "/models")["models"]]
        if len(names) != 1:
            raise InvalidConfig("--model", None, f"one of {', '.join(names)}" if names else "a service with a model")
        name = names[0]
    model = ask(target, "GET", f"/models/{name}")
    if model["state"] != "ready":
        raise ServiceRefused(f"{target}: model {name} is {model['state']}: {model.get('reason')}")
    return model


def check_limit(model: Json, option: str, values: Sequence[int], limit: Literal["max_beam_size", "max_m"]) -> None:
    """Raise InvalidConfig for a value that the model would refuse. A version that is not the default has no known limits."""
    if model["search"] is not None and max(values) > model["search"][limit]:
        raise InvalidConfig(option, max(values), f"1 to {model['search'][limit]}, the limit of model {model['name']}")
