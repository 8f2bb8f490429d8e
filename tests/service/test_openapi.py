"""The interface is what docs/openapi.json says, and holds against whatever follows from it.

After a wanted change: `python -m tests.service.test_openapi` writes the file anew; its difference belongs into the same commit.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from benchmarks.random_bundles import make_bundle
from espalier.engines import open_engine
from espalier.tree import complete_tree
from service.app import create_app
from service.settings import Settings
from tests import ROOT
from tests.service.fake_catalogue import FakeCatalogue, FakeCatalogues
from tests.service.running import Client, Json, Running, run
from tests.service.test_contract import ACCESS

GOLDEN = ROOT / "docs" / "openapi.json"
ADMIN, WRITE = "openapi-admin-key", "openapi-write-key"
ANSWERS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
OTHER_TYPES = [("post", "/retrieve/stream"), ("post", "/models/{name}/items"), ("post", "/internal/search")]
"""No media type that schemas describe; they have tests of their own."""
PROPERTY = settings(max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


def document(folder: Path, retrieve_keys: tuple[str, ...] = ("openapi-retrieve-key",)) -> Json:
    """What a service says of itself that has keys, unless told otherwise."""
    manifest = folder / "any" / "1" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()  # the folder is not read before the service starts
    keys = tuple(SecretStr(key) for key in retrieve_keys)
    found: Json = create_app(Settings(models=folder, retrieve_keys=keys)).openapi()
    return found


def test_the_golden_document_is_the_services_and_says_where_a_key_is_asked_for(tmp_path: Path) -> None:
    assert json.loads(GOLDEN.read_text()) == document(tmp_path), "see the top of this file"
    for keys, open_to_all in ((("openapi-retrieve-key",), {""}), ((), {"", "retrieve", "private", "internal"})):
        paths = document(tmp_path / str(len(keys)), keys)["paths"]
        operations = {f"{method} {path}": one for path, methods in paths.items() for method, one in methods.items()}
        needed = {name for access, names in ACCESS.items() if access not in open_to_all for name in names}
        assert {name for name, one in operations.items() if "security" in one} == needed
        assert {name for name, one in operations.items() if "401" in one["responses"]} == needed


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with one model on a real engine."""
    folder = tmp_path_factory.mktemp("openapi")
    rng = np.random.default_rng(3)
    columns = {"section": [("a", "b", None)[i % 3] for i in range(64)], "price": list(range(64))}
    make_bundle(folder, rng, complete_tree(rng.permutation(64), 2), name="books", columns=columns, max_beam_size=64, max_m=64)
    catalogues = FakeCatalogues(books=FakeCatalogue([f"item-{i}" for i in range(64)]))
    keys = {"admin_keys": (ADMIN,), "write_keys": (WRITE,)}
    with run(folder, lambda bundle: open_engine(bundle, "cpu"), catalogues, **keys, max_body_bytes=100_000) as started:
        yield started


@pytest.mark.parametrize(
    ("method", "path"),
    [
        (method, path)
        for path, methods in json.loads(GOLDEN.read_text())["paths"].items()
        for method in methods
        if (method, path) not in OTHER_TYPES
    ],
)
def test_whatever_follows_from_the_document_gets_a_documented_answer(running: Running, method: str, path: str) -> None:
    """No 5xx, the documented statuses, content types and schemas; wrong data is refused, right data is not."""
    described = running.client.get("/openapi.json").json()
    described["paths"][path][method].pop("security", None)  # a key is always sent, wanted or not
    api = schemathesis.openapi.from_dict(described)
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]

    @PROPERTY
    @given(case=st.one_of(*(api[path][method].as_strategy(generation_mode=mode) for mode in modes)))
    def holds(case: schemathesis.Case[Any]) -> None:
        if "/items" in path or "/changes" in path:  # of a model that there is; which versions serve is left alone
            case.path_parameters["name"] = "books"
        answer = send(case, running.client)
        too_large = answer.status_code == 413  # a refusal too, which the check does not know
        case.validate_response(answer, checks=ANSWERS if too_large else [*ANSWERS, negative_data_rejection])

    holds()


def send(case: schemathesis.Case[Any], client: Client) -> Any:
    """The case over the application's own transport."""
    kwargs = case.as_transport_kwargs(base_url="http://test")
    kwargs["headers"] = {**kwargs["headers"], "Authorization": f"Bearer {ADMIN}"}
    kwargs.pop("cookies")  # the interface has none
    if isinstance(kwargs.get("data"), bytes | str):
        kwargs["content"] = kwargs.pop("data")
    return schemathesis.Response.from_httpx(client.request(kwargs.pop("method"), kwargs.pop("url"), **kwargs), verify=False)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps(document(Path(folder)), indent=1, ensure_ascii=False) + "\n")
