"""The transport over deployment handles: answers, failures and waits, and which versions a shard serves. Ray is not started."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import yaml
from pydantic import ValidationError
from ray.serve.exceptions import DeploymentUnavailableError

from tests import ROOT

pytest.importorskip("ray", reason="Ray is not installed: pip install 'espalier[ray]'")

from ray.exceptions import ActorUnavailableError
from ray.serve.schema import ServeDeploySchema

from deploy.ray import ingress
from deploy.ray.app import build
from deploy.ray.arguments import POLL_S, Arguments, settings_of
from deploy.ray.handles import KEPT_S, HandleTransport
from deploy.ray.ingress import Ingress
from deploy.ray.shard import NotLoaded, Shard
from espalier.bundle import Bundle
from espalier.errors import BundleNotFound
from espalier.search import SearchParams
from espalier.shards.messages import Pin, decode_answer, encode_query
from service.http.api_keys import Keys
from service.models.registry import Registry
from service.router.transport import MasksWanted, ReplicaFailed, Transport
from tests.certificates import Authority
from tests.service.shards.cutting import cut, pin_of, queries_of, query_for, whole_bundle

SHARD = {"of": "books", "digest": "d" * 64, "index": 0, "count": 2, "engine": "compiled-cpu"}
FIRST, SECOND, THIRD = (SHARD | {"version": version} for version in (1, 2, 3))
DEAD = ActorUnavailableError("the actor is gone\nand a long trace", None)
Listed = Sequence[Mapping[str, Any]]


class Response:
    """A call of one replica; `work` makes its result."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work, self.cancelled = work, False

    def __await__(self) -> Generator[Any, None, Any]:
        return self._work.__await__()

    def cancel(self) -> None:
        self.cancelled = True


class Deployment:
    """A handle.

    answers  of searches in turn, the last again and again; None: never
    all_say  what its replicas say when all are asked
    """

    def __init__(self) -> None:
        self.search = SimpleNamespace(remote=self._remote)
        self.answers: list[tuple[int, bytes] | Exception | None] = [(200, b"found")]
        self.all_say: Sequence[Listed] | Exception = [[FIRST]]
        self.calls: list[Response] = []
        self.broadcasts = 0

    def broadcast(self, method_name: str) -> SimpleNamespace:
        assert method_name == "shards"
        self.broadcasts += 1
        return SimpleNamespace(results_async=self._all)

    def _remote(self, body: bytes) -> Response:
        self.calls.append(Response(self._search(body)))
        return self.calls[-1]

    async def _search(self, body: bytes) -> tuple[int, bytes]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        status, content = answer
        return status, body + b" " + content if status == 200 else content

    async def _all(self, timeout_s: float) -> Sequence[Listed]:
        await asyncio.sleep(0)
        if isinstance(self.all_say, Exception):
            raise self.all_say
        return self.all_say


@pytest.fixture
def deployment() -> Deployment:
    return Deployment()


@pytest.fixture
def transport(deployment: Deployment) -> Transport:
    return HandleTransport({"books-shards-0": deployment})


MOST = len(b"asked found")


def send(transport: Transport, timeout_s: float = 5, most: int = MOST) -> bytes:
    return asyncio.run(transport.send("books-shards-0/1", b"asked", most, timeout_s, {}))


def held(transport: Transport, timeout_s: float = 5) -> frozenset[Pin]:
    return asyncio.run(transport.served_shards("books-shards-0/1", timeout_s))


def versions(found: frozenset[Pin]) -> list[int]:
    return sorted(pin.version for pin in found)


def test_a_deployment_has_an_address_for_each_try_and_names_the_masks_that_it_lacks(transport: Transport, deployment: Deployment) -> None:
    addresses = asyncio.run(transport.addresses("books-shards-0"))
    assert len({*addresses}) == 3
    for address in addresses:
        assert asyncio.run(transport.send(address, b"asked", MOST, 5, {})) == b"asked found"
    deployment.answers = [(409, orjson.dumps(["a", "b"]))]
    with pytest.raises(MasksWanted) as raised:
        send(transport)
    assert raised.value.digests == ("a", "b")


@pytest.mark.parametrize(
    ("answers", "reason", "says"),
    [
        ([(410, b"")], "not_served", ""),
        ([(409, b"")], "garbage", "digests of masks were expected"),
        ([(200, b"found!")], "garbage", "12 bytes, expected at most 11"),
        ([DEAD], "connection", "ActorUnavailableError"),
    ],
)
def test_what_went_wrong_has_a_reason_and_one_line(
    transport: Transport, deployment: Deployment, answers: list[Any], reason: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.answers = answers
    monkeypatch.setattr("deploy.ray.handles.NOTICED_S", 0.05)
    with pytest.raises(ReplicaFailed) as raised:
        send(transport)
    assert raised.value.reason == reason
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_dead_replica_that_ray_still_chooses_is_asked_past(transport: Transport, deployment: Deployment) -> None:
    deployment.answers = [*[DEAD] * 5, (200, b"found")]
    assert send(transport) == b"asked found"
    assert len(deployment.calls) == 6


def test_what_is_late_or_given_up_is_cancelled_in_the_replica_too(transport: Transport, deployment: Deployment) -> None:
    deployment.answers = [None]
    with pytest.raises(ReplicaFailed) as raised:
        send(transport, timeout_s=0.01)
    assert raised.value.reason == "late"

    async def give_up() -> None:
        task = asyncio.create_task(transport.send("books-shards-0/0", b"asked", MOST, 5, {}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert [call.cancelled for call in deployment.calls] == [True, True]


def test_a_shard_serves_what_all_its_replicas_serve(transport: Transport, deployment: Deployment) -> None:
    deployment.all_say = [[FIRST, SECOND], [SECOND, THIRD]]
    assert versions(held(transport)) == [2]
    deployment.all_say = [[FIRST, SECOND], [SECOND, FIRST]]
    assert versions(held(transport)) == [1, 2]


def test_no_replica_is_no_shard(transport: Transport, deployment: Deployment) -> None:
    assert versions(held(transport)) == [1]
    deployment.all_say = DeploymentUnavailableError.__new__(DeploymentUnavailableError)
    with pytest.raises(ReplicaFailed, match="no replica runs"):
        held(transport)


@pytest.mark.parametrize("broken", [TimeoutError(), DEAD])
def test_while_a_replica_hangs_what_all_said_before_counts(transport: Transport, deployment: Deployment, broken: Exception) -> None:
    deployment.all_say = broken
    with pytest.raises(ReplicaFailed, match="not all replicas say what they serve"):
        held(transport)
    deployment.all_say = [[FIRST, SECOND], [SECOND, THIRD]]
    held(transport)
    deployment.all_say = broken
    assert versions(held(transport)) == [2]


def test_what_all_said_before_is_forgotten_where_one_is_silent_for_too_long(
    transport: Transport, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("deploy.ray.handles.time", SimpleNamespace(monotonic=lambda: now))
    held(transport)
    deployment.all_say = TimeoutError()
    now += KEPT_S
    assert versions(held(transport)) == [1]
    now += 0.1
    with pytest.raises(ReplicaFailed) as failed:
        held(transport)
    assert failed.value.reason == "late"
    deployment.all_say = [[SECOND]]
    assert versions(held(transport)) == [2]


@pytest.mark.parametrize("all_say", [[[FIRST]], TimeoutError()])
def test_all_addresses_of_a_deployment_are_looked_at_with_one_question(deployment: Deployment, all_say: Any) -> None:
    transport, deployment.all_say = HandleTransport({"books-shards-0": deployment}), all_say

    async def look() -> list[frozenset[Pin] | BaseException]:
        looks = [transport.served_shards(address, 5) for address in await transport.addresses("books-shards-0")]
        return await asyncio.gather(*looks, return_exceptions=True)

    for number in (1, 2):
        found = asyncio.run(look())
        assert len(found) == 3
        assert [str(one) for one in found] == [str(found[0])] * 3
        assert deployment.broadcasts == number


def test_a_look_that_is_given_up_does_not_end_that_of_other_addresses(transport: Transport, deployment: Deployment) -> None:
    async def look() -> frozenset[Pin]:
        first, second = (asyncio.create_task(transport.served_shards(f"books-shards-0/{number}", 5)) for number in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert versions(asyncio.run(look())) == [1]
    assert deployment.broadcasts == 1


# -- a replica of a shard answers what the service would, by status and body. Ray is not started --------------------------


class Started:
    """A replica in an event loop of its own, as Ray has one."""

    def __init__(self, whole: Bundle, shards: list[Bundle], folder: Path) -> None:
        self.whole, self.shards, self.folder = whole, shards, folder
        self.runner = asyncio.Runner()
        self.shard = self.runner.run(constructed(folder, index=1))

    def query(self, index: int = 1, **more: Any) -> Any:
        whole = self.whole
        return query_for(whole, self.shards[index], queries_of(whole), SearchParams.uniform(3, 8, 5), **more)

    def search(self, body: bytes) -> tuple[int, bytes]:
        return self.runner.run(self.shard.search(body))


async def constructed(folder: Path, index: int) -> Shard:
    shard = Shard.__new__(Shard)
    await Shard.__init__(shard, {"models": folder, "shard": index, "max_queue_ms": 10_000, "device": "cpu"})
    return shard


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("replica")
    whole = whole_bundle(folder / "models", "product")
    found = Started(whole, cut(whole, folder / "books-shards"), folder / "books-shards")
    yield found
    found.runner.close()


def test_a_replica_answers_as_the_route_refuses_by_status_and_says_what_it_serves_until_it_ends(started: Started) -> None:
    status, body = started.search(encode_query(started.query()))
    assert status == 200
    answer = decode_answer(body)
    assert answer.pin == pin_of(started.shards[1])
    assert answer.result.count_B.tolist() == [5, 5, 5]
    assert started.search(b"garbage")[0] == 422
    status, text = started.search(encode_query(started.query(index=0)))
    assert (status, b"is not served here" in text) == (410, True)
    status, digests = started.search(encode_query(started.query(masks=("0" * 32, None, None))))
    assert (status, orjson.loads(digests)) == (409, ["0" * 32])
    listed = started.runner.run(started.shard.shards())
    assert [(one["model"], one["version"], one["index"], one["count"], one["ready"]) for one in listed] == [("1", 1, 1, 2, True)]
    started.shard.check_health()
    other = started.runner.run(constructed(started.folder, 0))
    started.runner.run(other.stop())
    assert started.runner.run(other.search(encode_query(started.query(index=0))))[0] == 503
    with pytest.raises(NotLoaded, match="shutting down"):
        other.check_health()


def test_a_replica_is_not_there_where_nothing_can_serve(started: Started, tmp_path: Path) -> None:
    with pytest.raises(BundleNotFound):
        started.runner.run(constructed(tmp_path, 0))
    (damaged,) = cut(started.whole, tmp_path, count=1)
    damaged.path.joinpath("nodes.safetensors").write_bytes(b"damaged")
    with pytest.raises(NotLoaded, match=r"0 version 1: failed: .*nodes\.safetensors"):
        started.runner.run(constructed(tmp_path, 0))


def test_ray_sends_a_new_ingress_no_requests_before_its_models_are_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for them at most PATIENCE_S."""
    whole_bundle(tmp_path, "product")
    reasons = ["books version 1: loading"]
    monkeypatch.setattr(Registry, "not_ready", lambda _: reasons)

    async def started() -> None:
        app = Ingress({"books-shards-0": Deployment()}, {"models": tmp_path}, {}).__serve_build_asgi_app__()
        async with app.router.lifespan_context(app):
            pass

    async def begins() -> None:
        starting = asyncio.create_task(started())
        await asyncio.sleep(0.5)
        assert not starting.done()
        reasons.clear()
        await starting

    asyncio.run(begins())
    reasons.append("books version 1: failed")
    monkeypatch.setattr(ingress, "PATIENCE_S", 0.1)
    asyncio.run(started())


# -- what app.yaml may say, and what it makes of the service and of Ray. Nothing of Ray is started ------------------------


SHARDS = {"folder": "models/books-shards", "count": 2}


def arguments(**more: Any) -> Arguments:
    return Arguments.model_validate({"shards": [SHARDS]} | more)


def shards(**more: Any) -> Arguments:
    return arguments(shards=[SHARDS | more])


def options(given: Arguments) -> dict[str, Any]:
    """What Ray is told, by the name of the deployment."""
    ingress = build(given)._bound_deployment
    found = {ingress.name: ingress}
    for bound in ingress.init_args[0].values():
        found[bound._bound_deployment.name] = bound._bound_deployment
    return found


def test_the_file_in_the_repository_is_what_ray_and_the_builder_take() -> None:
    document = yaml.safe_load((ROOT / "deploy/ray/app.yaml").read_text())
    ServeDeploySchema.model_validate(document)
    (application,) = document["applications"]
    found = options(Arguments.model_validate(application["args"]))
    assert list(found) == ["ingress", "debian-depends-shards-0", "debian-depends-shards-1"]
    reserved = sum(deployment.ray_actor_options["num_cpus"] * deployment.num_replicas for deployment in found.values())
    assert reserved <= 2, "it runs on two cores"


def test_there_is_a_deployment_for_each_shard_with_its_settings_threads_and_reservation() -> None:
    given = arguments(models="m", shards=[SHARDS, {"folder": "models/films-shards", "count": 1, "settings": {"timeout_ms": 7}}])
    found = options(given)
    assert list(found) == ["ingress", "books-shards-0", "books-shards-1", "films-shards-0"]
    second = settings_of(found["books-shards-1"].init_args[0])
    assert (second.models, second.shard) == (Path("models/books-shards"), 1)
    assert settings_of(found["films-shards-0"].init_args[0]).timeout_ms == 7
    assert settings_of(found["ingress"].init_args[1]).models == Path("m")
    given = shards(cpus=2, gpus=0.5, memory_gb=1.5, resources={"ssd": 1}, autoscale={"min": 2, "max": 5, "target": 3})
    shard, ingress = options(given)["books-shards-0"], options(given)["ingress"]
    reserved = {name: shard.ray_actor_options[name] for name in ("num_cpus", "num_gpus", "memory", "resources")}
    assert reserved == {"num_cpus": 2, "num_gpus": 0.5, "memory": 1.5e9, "resources": {"ssd": 1}}
    scaling = shard._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 3)
    assert ingress.num_replicas == 1
    assert shard.max_ongoing_requests == 1024, "the replica itself refuses what is too much"
    assert options(shards(replicas=3))["books-shards-1"].num_replicas == 3
    for given, threads in ((shards(cpus=2.5), 2), (shards(cpus=0.5), 1), (shards(cpus=4, settings={"threads": 3}), 3)):
        assert settings_of(given.shard_settings(given.shards[0], 0)).threads == threads


def test_replicas_look_for_new_versions_and_live_items_have_one_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments()
    assert settings_of(given.ingress_settings()).poll_s == POLL_S
    monkeypatch.setenv("ESPALIER_POLL_S", "9")
    assert settings_of(given.ingress_settings()).poll_s == 9
    assert settings_of(arguments(settings={"poll_s": 4}).ingress_settings()).poll_s == 4
    monkeypatch.setenv("ESPALIER_WRITE_KEYS", "a-key-of-sixteen-characters")
    arguments()
    for several in ({"replicas": 2}, {"autoscale": {"max": 2}}):
        with pytest.raises(ValidationError, match=r"ingress\.replicas: got several, expected 1"):
            arguments(ingress=several)


def test_a_write_key_of_the_file_of_keys_is_one_too(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    for role in ("admin", "write"):
        file.write_text(f'[[keys]]\nname = "a"\nkey = "a-key-of-sixteen-characters"\nrole = "{role}"\n')
        given = {"replicas": 2, "settings": {"keys_file": str(file)}}
        with pytest.raises(ValidationError, match=r"ingress\.replicas: got several") if role == "write" else nullcontext():
            arguments(ingress=given)


def test_no_held_out_query_is_shown_where_other_machines_may_reach_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_HOST", "127.0.0.1")
    assert not Keys(settings_of(arguments().ingress_settings())).shows_all
    monkeypatch.setenv("ESPALIER_OPEN", "1")
    assert Keys(settings_of(arguments().ingress_settings())).shows_all


def test_settings_that_would_protect_nothing_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pair = Authority(tmp_path).signs("service")
    tls = {"tls_certificate": str(pair.certificate), "tls_key": str(pair.key)}
    for refused, values in (("admin_address", {"admin_address": "127.0.0.1:8001"}), ("tls_certificate", tls)):
        with monkeypatch.context() as patch:
            for name, value in values.items():
                patch.setenv(f"ESPALIER_{name.upper()}", value)
            with pytest.raises(ValidationError, match=f"got ESPALIER_{refused.upper()}, expected none"):
                arguments()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"shards": []}, "shards"),
        ({"shards": [SHARDS | {"replica": 2}]}, "shards.0.replica"),
        ({"shards": [SHARDS | {"replicas": 2, "autoscale": {"max": 3}}]}, "expected one of them"),
        ({"shards": [SHARDS | {"autoscale": {"min": 3, "max": 2}}]}, "expected at least min, 3"),
        ({"shards": [SHARDS, SHARDS]}, "books-shards-0"),
        ({"shards": [SHARDS | {"settings": {"treads": 2}}]}, "shards.0.settings: treads: expected no such key"),
        ({"shards": [SHARDS], "settings": {"timeout_ms": 0}}, "timeout_ms"),
        ({"shards": [SHARDS], "settings": {"store": "s3://a"}}, "shards.0.settings: store: got that of the whole bundles"),
        ({"shards": [SHARDS], "router": {"hedge": 2}}, "router.hedge"),
        (  # Ray logs it
            {"shards": [SHARDS], "ingress": {"settings": {"admin_keys": "a-key-of-sixteen-characters"}}},
            "ingress.settings: got admin_keys, expected ESPALIER_ADMIN_KEYS in the environment",
        ),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Arguments.model_validate(given)
    assert says in str(raised.value)
