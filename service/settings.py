"""The settings of the service, and the only place that reads the environment, but for healthcheck.py.

Every setting is an environment variable: `ESPALIER_` and its name in capitals.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from espalier.engines import ENGINES
from espalier.errors import expectation
from espalier.search import Device, Precision
from espalier.shards.messages import MAX_TIMEOUT_MS
from espalier.store.urls import check_url

from . import tls
from .keys_file import read_keys

log = logging.getLogger(__name__)

PREFIX = "ESPALIER_"
CLIENTS_KEY, SHARD_STORE = f"{PREFIX}KEY", f"{PREFIX}SHARD_STORE"
"""Variables that are no settings: the key of commands that readers copy, and the compose file's store of shards."""
_SERVICE_LINK = re.compile(r"ESPALIER_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""What Kubernetes sets beside ESPALIER_PORT in the containers of a namespace with a Service `espalier` or `espalier-…`."""


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _no_link(value: object) -> object:
    """Kubernetes sets ESPALIER_PORT=tcp://… in the containers of a namespace with a Service `espalier`; that is not meant as a setting."""
    return 8000 if isinstance(value, str) and value.startswith("tcp://") else value


def _listed(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _long_enough(secret: SecretStr) -> SecretStr:
    if len(named_key(secret.get_secret_value())[1]) < MIN_KEY:
        raise ValueError(f"expected a key of at least {MIN_KEY} characters, or NAME:KEY with such a key")
    return secret


def _known_engine(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"one of {', '.join(ENGINES)}")
    return name


def _host(value: str) -> str:
    try:
        value.encode("idna")
    except UnicodeError:
        raise ValueError("an address or the name of a host") from None
    return value


def _host_and_port(value: str) -> str:
    host, port = split_address(value)
    if not host or port is None:
        raise ValueError("an address and its port, as 127.0.0.1:8001 or [::1]:8001")
    _host(host)
    return value


def split_address(value: str) -> tuple[str, int | None]:
    """(host, port) of HOST:PORT; the port is None where there is none."""
    try:
        parts = urlsplit(f"//{value}")
        whole = parts.netloc == value and "@" not in value
        return (parts.hostname or "", parts.port) if whole else ("", None)
    except ValueError:
        return "", None


def service_address(value: str) -> str:
    """The address of a service without a slash at its end. Raises ValueError."""
    expected = "expected the address of a service, https://HOST or http://HOST:PORT"
    try:
        parts = urlsplit(value)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        more = parts.query or parts.fragment or parts.username
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from None
    if not right or more or re.search(r"[\x00-\x20\x7f]", value):
        raise ValueError(expected)
    return value.rstrip("/")


MAX_S = 86_400.0
"""Longest time that a setting may say, a day."""
MAX_THREADS = 1024
MAX_WORKERS = 1024
MAX_SAMPLES = 10_000
"""Most queries of customers that a worker keeps."""
MIN_KEY = 16
"""Fewest characters of an API key."""
NAMED_KEY = re.compile(r"([A-Za-z0-9_.-]{1,32}):(.+)", re.DOTALL)
Seconds = Annotated[float, Field(le=MAX_S, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(le=MAX_TIMEOUT_MS, allow_inf_nan=False)]
Key = Annotated[SecretStr, AfterValidator(_long_enough)]
Keys = Annotated[tuple[Key, ...], NoDecode, BeforeValidator(_listed)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)]


def named_key(written: str) -> tuple[str | None, str]:
    """(name, key) of a key as it is written, KEY or NAME:KEY."""
    found = NAMED_KEY.fullmatch(written)
    return (found[1], found[2]) if found else (None, written)


class Settings(BaseSettings):
    """Read once, when the service starts."""

    model_config = SettingsConfigDict(env_prefix="ESPALIER_", env_ignore_empty=True, frozen=True)

    store: Annotated[str, AfterValidator(check_url)] | None = Field(
        default=None,
        description="Where models come from: s3://BUCKET/PATH, gs://…, az://… or file:///FOLDER. `models` is then a cache.",
    )
    store_poll_s: Seconds = Field(default=10.0, gt=0, description="Seconds between looks at the store; after failures up to a minute.")
    store_keep: int = Field(
        default=2, ge=1, description="Highest versions of a model that stay on disk although nobody needs them, of those from the store."
    )
    backup: Annotated[str, AfterValidator(check_url)] | None = Field(
        default=None,
        description="Where journals, removals and defaults are backed up: the URL of a store. A host that follows another makes none.",
    )
    backup_every_s: Seconds = Field(default=3600.0, gt=0, description="Seconds between two backups of a model; none if nothing changed.")
    backup_keep: int = Field(
        default=24, ge=1, description="Newest backups of a model that stay; the last of each of seven days stays beside them."
    )
    models: Path = Field(default=Path("models"), description="Folder of the models, each version in `NAME/VERSION/`.")
    device: Device = Field(default="auto", description="`auto` takes a GPU where there is one; `cuda` without a GPU is an error.")
    engine: Annotated[str, AfterValidator(_known_engine)] | None = Field(
        default=None, description=f"Engine by name, instead of the choice by device: {', '.join(ENGINES)}."
    )
    precision: Precision = Field(
        default="float32",
        description="Of node rows in `triton`, of weights in `sparse-cuda`. Halves are faster and smaller, and round ranks.",
    )
    threads: int = Field(
        default=1, ge=1, le=MAX_THREADS, description="Threads inside one CPU search. One worker per core with one thread each scales best."
    )
    host: Annotated[str, AfterValidator(_host)] = Field(default="127.0.0.1", description="Address to listen on.")
    port: Annotated[int, BeforeValidator(_no_link)] = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one."
    )
    admin_address: Annotated[str, AfterValidator(_host_and_port)] | None = Field(
        default=None,
        description="HOST:PORT of a second address, which alone answers admin and `private` routes, /metrics, the console and /docs.",
    )
    tls_certificate: Path | None = Field(
        default=None,
        description="PEM file of the service's certificate and of those between it and its CA: all addresses then speak TLS alone. "
        "This and other TLS files are read again when they change.",
    )
    tls_key: Path | None = Field(default=None, description="PEM file of that certificate's key, without a password.")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM file of CAs: clients must show a certificate that one of them has signed (mTLS)."
    )
    tls_ca: Path | None = Field(
        default=None,
        description="PEM file of the CAs of services that this one calls by https: shards, the one that it follows. None: the system's.",
    )
    tls_client_certificate: Path | None = Field(default=None, description="PEM file of the certificate that these services are shown.")
    tls_client_key: Path | None = Field(default=None, description="PEM file of its key, without a password.")
    max_batch: int | None = Field(default=None, ge=1, description="Most queries in one engine call. None: 16 on a CPU, 512 on a GPU.")
    max_wait_us: int = Field(default=0, ge=0, le=100_000, description="Microseconds that a free engine waits for more queries.")
    max_inline_us: int = Field(
        default=200,
        ge=0,
        le=10_000,
        description="Microseconds. A query that a free CPU engine answers in less is not handed to its thread; 0: all are.",
    )
    max_queue: int = Field(default=1024, ge=1, description="Most queries that wait for one model's engine; more are answered 429.")
    max_queue_ms: Milliseconds = Field(
        default=100.0, gt=0, description="Longest expected wait in a burst; in overload the queue is far shorter."
    )
    timeout_ms: Milliseconds = Field(default=1000.0, gt=0, description="Deadline of a request that names none.")
    max_timeout_ms: Milliseconds = Field(default=60_000.0, gt=0, description="Longest deadline that a request may name.")
    max_queries: int = Field(default=256, ge=1, le=4096, description="Most queries in one request.")
    max_body_bytes: int = Field(default=1 << 20, ge=1, description="Largest request body, and longest line of a stream.")
    max_search_bytes: int = Field(default=16 << 20, ge=1, description="Largest body of a router's search of a shard.")
    max_search_values: int = Field(
        default=2_000_000,
        ge=1,
        description="Most results in one answer to a router: queries × the largest m. All answers under way hold four times that.",
    )
    max_history: int = Field(default=1000, ge=1, description="Most ids in one history, and in one list of exclusions.")
    max_features: int = Field(default=10_000, ge=1, description="Most features in one query.")
    max_text: int = Field(default=4096, ge=1, description="Most characters in one query's text.")
    max_filter_values: int = Field(default=1000, ge=1, description="Most values in a request's `filter`, and in its `exclude_filter`.")
    max_explained: int = Field(default=8, ge=1, description="Most queries in a request with `explain`, and most ids in `explain_items`.")
    widen: float = Field(
        default=4.0,
        ge=1,
        le=1_000_000,
        description="Factor by which the beam may grow where a filter leaves few items; 1: never.",
    )
    max_answer_values: int = Field(
        default=200_000,
        ge=1,
        description="Most values in one answer: queries × m × (2 + fields). All answers under way hold four times that.",
    )
    max_connections: int = Field(
        default=1024,
        ge=1,
        description="Most connections per worker. Beyond it an idle one is closed; if all are busy, the new one gets 503.",
    )
    head_timeout_s: Seconds = Field(default=10.0, gt=0, description="Seconds in which the head of a request must have arrived.")
    keep_alive_s: Seconds = Field(
        default=75.0, gt=0, description="Seconds that a connection may be idle between requests; more than your load balancer's."
    )
    write_timeout_s: Seconds = Field(
        default=30.0, gt=0, description="Seconds that a client may take nothing of its answer before it is cut off."
    )
    body_timeout_s: Seconds = Field(default=10.0, gt=0, description="Seconds in which a request body must have arrived.")
    stream_idle_s: Seconds = Field(
        default=60.0, gt=0, description="Seconds that a stream may be silent, or leave answers unread, before it ends."
    )
    stream_window: int = Field(default=32, ge=1, description="Lines of one stream that are read ahead of the answers.")
    max_removed: int = Field(default=100_000, ge=1, le=1_000_000, description="Most ids on a model's list of removals.")
    max_live: int = Field(
        default=65_536,
        ge=1,
        le=1 << 18,
        description="Most live items of one model; more are answered 507 until a fold. Deletes are still taken.",
    )
    follow: Annotated[str, AfterValidator(service_address)] | None = Field(
        default=None,
        description="Another host's service, https://HOST, whose live items this one follows. Writes here are then answered 409.",
    )
    follow_key: SecretStr | None = Field(default=None, description="Key of that service's role `admin`.")
    max_bulk: int = Field(default=4, ge=1, description="Most bulk requests that one worker reads at a time; more are answered 429.")
    retrieve_keys: Keys = Field(
        default=(), description="Keys, comma-separated, KEY or NAME:KEY, of which a retrieval must bring one. None: everybody may retrieve."
    )
    write_keys: Keys = Field(
        default=(),
        description="Keys that may put and delete items, and do nothing else. None: nobody may.",
    )
    admin_keys: Keys = Field(default=(), description="Keys that may change what is served, retrieve and write. None: nobody may.")
    internal_keys: Keys = Field(
        default=(),
        description="Keys with which routers search shards. None: everybody may if the service has no keys at all, else nobody.",
    )
    open: bool = Field(
        default=False,
        description="Whether a service that other machines reach and that has no keys shows everybody what people did (`private` routes).",
    )
    keys_file: Path | None = Field(
        default=None,
        description="TOML file of keys with models, expiry and limits, read again when it changes (docs/serve.md). With one, every "
        "retrieval needs a key.",
    )
    cors_origins: Names = Field(default=(), description="Web origins, comma-separated, whose pages may call the service.")
    console: bool = Field(default=True, description="Serve the console at `/`; its routes are there either way.")
    workers: int = Field(default=1, ge=1, le=MAX_WORKERS, description="Processes that serve, on a CPU; a GPU takes one.")
    poll_s: Seconds | None = Field(
        default=None,
        gt=0,
        description="Seconds between looks for new versions in the models folder. None: only by admin request; with a store each second.",
    )
    shard: int | None = Field(default=None, ge=0, description="Serve this shard alone of a folder of shards. None: all models there.")
    shard_linger_s: Seconds = Field(
        default=30.0,
        ge=0,
        description="Seconds that a shard's version below the two highest serves on after its last search.",
    )
    probe_per_s: float | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Held-out and golden queries replayed per second, version and worker, to watch recall. None or 0: no probe.",
    )
    sample_queries: int = Field(
        default=0,
        ge=0,
        le=MAX_SAMPLES,
        description="Most recent queries of customers that each worker keeps in memory for admins; 0: none.",
    )
    load_timeout_s: Seconds = Field(
        default=600.0, gt=0, description="Seconds that a change of versions waits for every worker; then it is reverted."
    )
    mask_cache_bytes: int = Field(
        default=256 << 20,
        ge=0,
        description="Memory for the masks of filters, per loaded version; as much again with live items. A mask takes a byte per node.",
    )
    drain_delay_s: Seconds = Field(
        default=0.0, ge=0, description="Seconds between the signal to stop and the end of listening; /readyz says 503 meanwhile."
    )
    drain_s: Seconds = Field(default=10.0, ge=0, description="Seconds that a shutdown waits for accepted requests.")
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_upper)] = Field(
        default="INFO", description="Least severe messages that are logged."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="A line of text, or a JSON object, per message.")
    log_requests: Literal["none", "failed", "all"] = Field(
        default="failed", description="Which retrievals are logged with model, m, beam and timings; `failed` are those answered 5xx."
    )
    otlp_endpoint: str | None = Field(
        default=None, description="Where OpenTelemetry spans go, as http://HOST:4318/v1/traces; needs the extra `otel`."
    )
    run_folder: Path | None = Field(default=None, description="Set by the service for its own workers: where they share their state.")
    verify: bool = Field(default=True, description="Compare every file of a bundle with its checksum before it serves.")

    @field_validator("keys_file")
    @classmethod
    def _keys_can_be_read(cls, file: Path | None) -> Path | None:
        if file is not None:
            read_keys(file)
        return file

    @field_validator("max_timeout_ms")
    @classmethod
    def _default_is_allowed(cls, most: float, info: ValidationInfo) -> float:
        if most < info.data.get("timeout_ms", most):
            raise ValueError(f"at least ESPALIER_TIMEOUT_MS, {info.data['timeout_ms']:g}")
        return most

    @model_validator(mode="before")
    @classmethod
    def _no_misspelt_keys(cls, given: dict[str, Any]) -> dict[str, Any]:
        """A key, a CA or an address under a name that is no setting would leave open what it should protect."""
        for name, nearest in unknown_settings(os.environ).items():
            protects = re.search("KEY|TLS", name.upper()) or re.search("_KEYS?$|_TLS_|_ADMIN_", nearest or "")
            if name != CLIENTS_KEY and protects:
                raise ValueError(f"{name}: no such setting, so it would protect nothing; {_nearest(nearest)}")
        return given

    @model_validator(mode="after")
    def _tls_files_can_be_used(self) -> Settings:
        try:
            if self.certificates is not None:
                self.certificates.current()
            elif self.tls_client_ca is not None:
                raise ValueError("ESPALIER_TLS_CERTIFICATE and ESPALIER_TLS_KEY beside ESPALIER_TLS_CLIENT_CA")
            if self.tls_ca or self.tls_client_certificate or self.tls_client_key:
                self.client_certificates.current()
        except OSError as error:
            raise ValueError(f"TLS files that can be used: {error}") from None
        return self

    @model_validator(mode="before")
    @classmethod
    def _store_is_polled(cls, given: dict[str, Any]) -> dict[str, Any]:
        """What comes from a store is found in the models folder without being told."""
        return given | {"poll_s": 1.0} if given.get("store") and given.get("poll_s") is None else given

    @property
    def private_host(self) -> str:
        """Of the address that answers `private` routes."""
        return self.host if self.admin_address is None else split_address(self.admin_address)[0]

    @property
    def certificates(self) -> tls.Certificates | None:
        """New ones: what the service shows its clients; None: it speaks no TLS."""
        pair = _both(self.tls_certificate, self.tls_key, "ESPALIER_TLS_CERTIFICATE", "ESPALIER_TLS_KEY")
        return None if pair is None else tls.served(*pair, self.tls_client_ca)

    @property
    def client_certificates(self) -> tls.Certificates:
        """New ones: for calls to other services."""
        pair = _both(self.tls_client_certificate, self.tls_client_key, "ESPALIER_TLS_CLIENT_CERTIFICATE", "ESPALIER_TLS_CLIENT_KEY")
        return tls.calling(self.tls_ca, *(pair or (None, None)))


def _both(one: Path | None, other: Path | None, *names: str) -> tuple[Path, Path] | None:
    if (one is None) != (other is None):
        raise ValueError(f"both of {' and '.join(names)}, or neither")
    return None if one is None or other is None else (one, other)


def unknown_settings(environment: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that look like settings and are none → the setting with the nearest name, None where none is near."""
    settings = {PREFIX + name.upper() for name in Settings.model_fields}
    found: dict[str, str | None] = {}
    for name, value in environment.items():
        upper = name.upper()
        is_link = _SERVICE_LINK.fullmatch(upper) or (upper.endswith("_PORT") and re.match("(tcp|udp|sctp)://", value))
        if upper.startswith(PREFIX) and value and upper not in settings and upper != SHARD_STORE and not is_link:
            known = [] if name == CLIENTS_KEY else [known.removeprefix(PREFIX) for known in settings]
            near = difflib.get_close_matches(upper.removeprefix(PREFIX), known, 1)
            found[name] = PREFIX + near[0] if near else None
    return found


def warn_of_unknown_settings(settings: Settings) -> None:
    """Log the variables that look like settings and have no effect."""
    for name, nearest in unknown_settings(os.environ).items():
        if name != CLIENTS_KEY or not settings.retrieve_keys:
            log.warning("%s is no setting and has no effect; %s", name, _nearest(nearest))


def _nearest(setting: str | None) -> str:
    return "docs/reference.md lists all settings" if setting is None else f"the nearest is {setting}"


def refusals(error: ValidationError) -> list[str]:
    """What is wrong with settings, a line each; keys are shown nowhere."""
    lines = []
    for wrong in error.errors(include_url=False):
        if not wrong["loc"]:
            lines.append(expectation(wrong))
            continue
        name = str(wrong["loc"][0])
        secret = "a key" if name.endswith(("_key", "_keys")) else "a URL" if name in ("store", "backup") else None
        lines.append(f"{PREFIX}{name.upper()}: got {secret or repr(wrong['input'])}, expected {expectation(wrong)}")
    return lines


def is_local(host: str) -> bool:
    """Whether an address to listen on is reached from this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def metrics_folder(run_folder: Path) -> Path:
    """Where the workers of a run folder count together."""
    return run_folder / "metrics"
