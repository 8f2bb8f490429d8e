"""The settings of the service. Only this file and healthcheck.py read the environment.

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
"""Variables that are not settings: the key in commands of the documentation, and the store of shards in the compose file."""
_SERVICE_LINK = re.compile(r"ESPALIER_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""Variables that Kubernetes sets, besides ESPALIER_PORT, in the containers of a namespace with a Service `espalier` or `espalier-…`."""


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _not_kubernetes_link(value: object) -> object:
    """Replace ESPALIER_PORT=tcp://…, which Kubernetes sets in the containers of a namespace with a Service `espalier`, by the default."""
    return 8000 if isinstance(value, str) and value.startswith("tcp://") else value


def _split_list(value: object) -> object:
    return tuple(entry.strip() for entry in value.split(",") if entry.strip()) if isinstance(value, str) else value


def _check_key_length(secret: SecretStr) -> SecretStr:
    if len(named_key(secret.get_secret_value())[1]) < MIN_KEY:
        raise ValueError(f"expected a key of at least {MIN_KEY} characters, or NAME:KEY with such a key")
    return secret


def _check_engine(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"one of {', '.join(ENGINES)}")
    return name


def _check_host(value: str) -> str:
    try:
        value.encode("idna")
    except UnicodeError:
        raise ValueError("an address or the name of a host") from None
    return value


def _check_host_and_port(value: str) -> str:
    host, port = split_address(value)
    if not host or port is None:
        raise ValueError("an address and its port, as 127.0.0.1:8001 or [::1]:8001")
    _check_host(host)
    return value


def split_address(value: str) -> tuple[str, int | None]:
    """(host, port) of HOST:PORT. The port is None without one; the host is empty if the text is no address."""
    try:
        url = urlsplit(f"//{value}")
        is_address = url.netloc == value and "@" not in value
        return (url.hostname or "", url.port) if is_address else ("", None)
    except ValueError:
        return "", None


def service_address(value: str) -> str:
    """The address of a service without a final slash. Raises ValueError."""
    expected = "expected the address of a service, https://HOST or http://HOST:PORT"
    try:
        url = urlsplit(value)
        is_http = url.scheme in ("http", "https") and url.hostname and url.port != 0
        has_more = url.query or url.fragment or url.username
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from None
    if not is_http or has_more or re.search(r"[\x00-\x20\x7f]", value):
        raise ValueError(expected)
    return value.rstrip("/")


USUAL_PORTS = {"http": ":80", "https": ":443"}


def _check_origin(value: str) -> str:
    if not re.fullmatch(r"\*|https?://[a-z0-9.:\[\]-]+", value.lower()):
        raise ValueError("* or a web origin without a path, as https://shop.example")
    scheme, _, host = value.lower().partition("://")  # as browsers send origins: in lower case, without the scheme's usual port
    return f"{scheme}://{host.removesuffix(USUAL_PORTS[scheme])}" if host else value


MAX_S = 86_400.0
"""Longest time of a setting: a day."""
MAX_THREADS = 1024
MAX_WORKERS = 1024
MAX_SAMPLES = 10_000
"""Most customers' queries that a worker keeps."""
MIN_KEY = 16
"""Fewest characters of an API key."""
NAMED_KEY = re.compile(r"([A-Za-z0-9_.-]{1,32}):(.+)", re.DOTALL)
Seconds = Annotated[float, Field(le=MAX_S, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(le=MAX_TIMEOUT_MS, allow_inf_nan=False)]
Key = Annotated[SecretStr, AfterValidator(_check_key_length)]
Keys = Annotated[tuple[Key, ...], NoDecode, BeforeValidator(_split_list)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_check_origin)], ...], NoDecode, BeforeValidator(_split_list)]


def named_key(written: str) -> tuple[str | None, str]:
    """(name, key) from the text of a setting, KEY or NAME:KEY."""
    match = NAMED_KEY.fullmatch(written)
    return (match[1], match[2]) if match else (None, written)


class Settings(BaseSettings):
    """Read once, when the service starts."""

    model_config = SettingsConfigDict(env_prefix="ESPALIER_", env_ignore_empty=True, frozen=True)

    store: Annotated[str, AfterValidator(check_url)] | None = Field(
        default=None, description="Where models come from: s3://BUCKET/PATH, gs://…, az://… or file:///FOLDER. `models` is then a cache."
    )
    store_poll_s: Seconds = Field(default=10.0, gt=0, description="Seconds between two looks at the store; after failures, up to a minute.")
    store_keep: int = Field(default=2, ge=1, description="Highest versions of a model from the store that stay on disk even if unused.")
    backup: Annotated[str, AfterValidator(check_url)] | None = Field(
        default=None, description="URL of the store for backups of journals, removals and defaults. A host that follows another makes none."
    )
    backup_every_s: Seconds = Field(default=3600.0, gt=0, description="Seconds between two backups of a model; none if nothing changed.")
    backup_keep: int = Field(
        default=24, ge=1, description="Number of newest backups of a model that are kept, besides the last of each of seven days."
    )
    models: Path = Field(default=Path("models"), description="Folder of the models, each version in `NAME/VERSION/`.")
    device: Device = Field(default="auto", description="`auto` uses a GPU if there is one; `cuda` without a GPU is an error.")
    engine: Annotated[str, AfterValidator(_check_engine)] | None = Field(
        default=None, description=f"Engine by name, instead of the choice by device: {', '.join(ENGINES)}."
    )
    precision: Precision = Field(
        default="float32",
        description="Precision of rows in `triton` and of weights in `sparse-cuda`. Half precision is faster and smaller, but rounds.",
    )
    threads: int = Field(
        default=1, ge=1, le=MAX_THREADS, description="Threads inside one CPU search. One worker per core with one thread each scales best."
    )
    host: Annotated[str, AfterValidator(_check_host)] = Field(default="127.0.0.1", description="Address to listen on.")
    port: Annotated[int, BeforeValidator(_not_kubernetes_link)] = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one."
    )
    admin_address: Annotated[str, AfterValidator(_check_host_and_port)] | None = Field(
        default=None,
        description="HOST:PORT of a second address, which alone answers admin and `private` routes, /metrics, the console and /docs.",
    )
    tls_certificate: Path | None = Field(
        default=None,
        description="PEM file of the service's certificate and the intermediate ones. With it, all addresses speak only TLS 1.2 or "
        "newer. TLS files are read again when they change.",
    )
    tls_key: Path | None = Field(default=None, description="PEM file of that certificate's key, without a password.")
    tls_client_ca: Path | None = Field(
        default=None,
        description="PEM file of CAs: clients must show a certificate that one of them has signed (mTLS). CRLs in it or "
        "ESPALIER_TLS_CA count: each CA needs one.",
    )
    tls_ca: Path | None = Field(
        default=None,
        description="PEM file of the CAs of services that this one calls: shards, or the host that it follows. None: the system's.",
    )
    tls_client_certificate: Path | None = Field(default=None, description="PEM file of the certificate for calls to these services.")
    tls_client_key: Path | None = Field(default=None, description="PEM file of that certificate's key, without a password.")
    max_batch: int | None = Field(default=None, ge=1, description="Most queries in one engine call. None: 16 on a CPU, 512 on a GPU.")
    max_wait_us: int = Field(default=0, ge=0, le=100_000, description="Microseconds that a free engine waits for more queries.")
    max_inline_us: int = Field(
        default=200,
        ge=0,
        le=10_000,
        description="Microseconds. Shorter queries are searched by the event loop itself if a CPU engine is free. 0: none.",
    )
    max_queue: int = Field(default=1024, ge=1, description="Most queries that wait for one model's engine; more are answered 429.")
    max_queue_ms: Milliseconds = Field(
        default=100.0, gt=0, description="Longest expected wait in a burst; in overload the queue is far shorter."
    )
    timeout_ms: Milliseconds = Field(default=1000.0, gt=0, description="Deadline of a request that does not set one.")
    max_timeout_ms: Milliseconds = Field(default=60_000.0, gt=0, description="Longest deadline that a request may set.")
    max_queries: int = Field(default=256, ge=1, le=4096, description="Most queries in one request.")
    max_body_bytes: int = Field(default=1 << 20, ge=1, description="Largest request body, and longest line of a stream.")
    max_search_bytes: int = Field(default=16 << 20, ge=1, description="Largest body of a router's search of a shard.")
    max_search_values: int = Field(
        default=2_000_000,
        ge=1,
        description="Most results in one answer to a router: queries × the largest m. All unfinished answers may have four times that.",
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
        description="Largest factor by which a filter may widen the beam.",
    )
    max_answer_values: int = Field(
        default=200_000,
        ge=1,
        description="Most values in one answer: queries × m × (2 + fields). All unfinished answers together may have four times that.",
    )
    max_connections: int = Field(
        default=1024,
        ge=1,
        description="Most connections per worker. A further one replaces an idle one; if all are busy, it gets 503.",
    )
    head_timeout_s: Seconds = Field(default=10.0, gt=0, description="Seconds in which the head of a request must have arrived.")
    keep_alive_s: Seconds = Field(
        default=75.0, gt=0, description="Seconds that a connection may be idle between requests. Set it higher than your load balancer's."
    )
    write_timeout_s: Seconds = Field(
        default=30.0, gt=0, description="Seconds after which a client that reads nothing of its answer is cut off."
    )
    body_timeout_s: Seconds = Field(default=10.0, gt=0, description="Seconds in which a request body must have arrived.")
    stream_idle_s: Seconds = Field(
        default=60.0, gt=0, description="Seconds after which a stream that is silent, or leaves answers unread, ends."
    )
    stream_window: int = Field(default=32, ge=1, description="Lines of one stream that are read ahead of the answers.")
    max_removed: int = Field(default=100_000, ge=1, le=1_000_000, description="Most ids on a model's list of removals.")
    max_live: int = Field(
        default=65_536,
        ge=1,
        le=1 << 18,
        description="Most live items of one model; more are answered 507 until a fold.",
    )
    follow: Annotated[str, AfterValidator(service_address)] | None = Field(
        default=None,
        description="Another host's service, https://HOST, whose live items this one follows. Writes here are then answered 409.",
    )
    follow_key: SecretStr | None = Field(default=None, description="Key of that service's role `admin`.")
    max_bulk: int = Field(default=4, ge=1, description="Most bulk requests that one worker reads at a time; more are answered 429.")
    retrieve_keys: Keys = Field(
        default=(), description="Keys for retrieval, comma-separated, each KEY or NAME:KEY. None: everybody may retrieve."
    )
    write_keys: Keys = Field(default=(), description="Keys that may only put and delete items. None: nobody may.")
    admin_keys: Keys = Field(default=(), description="Keys that may use all routes. None: the admin routes are off.")
    internal_keys: Keys = Field(
        default=(), description="Keys with which routers search shards. None: everybody may if the service has no keys at all, else nobody."
    )
    open: bool = Field(
        default=False,
        description="Whether everybody may use the `private` routes, which show what people did, on a reachable service without keys.",
    )
    keys_file: Path | None = Field(
        default=None,
        description="TOML file of keys with models, expiry and limits, read again when it changes (docs/serve.md). With one, every "
        "retrieval needs a key.",
    )
    cors_origins: Origins = Field(default=(), description="Web origins, comma-separated, whose pages may call the service.")
    console: bool = Field(default=True, description="Whether to serve the console at `/`. The routes that it uses are served in any case.")
    workers: int = Field(default=1, ge=1, le=MAX_WORKERS, description="Number of processes that serve on a CPU. With a GPU, it must be 1.")
    poll_s: Seconds | None = Field(
        default=None,
        gt=0,
        description="Seconds between looks for new versions. None: only admin requests load them; with a store 1.",
    )
    shard: int | None = Field(default=None, ge=0, description="Number of the only shard to serve from a folder of shards. None: all.")
    shard_linger_s: Seconds = Field(
        default=30.0,
        ge=0,
        description="Seconds after its last search for which a shard's version below the two highest still serves.",
    )
    probe_per_s: float | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Held-out and golden queries that each worker replays per second and version, to monitor recall.",
    )
    sample_queries: int = Field(
        default=0,
        ge=0,
        le=MAX_SAMPLES,
        description="Customers' most recent queries that each worker keeps in memory for admins.",
    )
    load_timeout_s: Seconds = Field(
        default=600.0, gt=0, description="Seconds for which a change of versions waits for every worker. After that it is reverted."
    )
    mask_cache_bytes: int = Field(
        default=256 << 20,
        ge=0,
        description="Memory for the masks of filters, per loaded version; twice that with live items.",
    )
    drain_delay_s: Seconds = Field(
        default=0.0, ge=0, description="Seconds between the signal to stop and the end of listening. /readyz answers 503 meanwhile."
    )
    drain_s: Seconds = Field(default=10.0, ge=0, description="Seconds for which a shutdown waits for accepted requests.")
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_upper)] = Field(
        default="INFO", description="Least severe messages that are logged."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="A line of text, or a JSON object, per message.")
    log_requests: Literal["none", "failed", "all"] = Field(
        default="failed", description="The retrievals that are logged with model, m, beam and timings. `failed`: those answered 5xx."
    )
    otlp_endpoint: str | None = Field(
        default=None, description="URL for OpenTelemetry spans, as http://HOST:4318/v1/traces. It needs the extra `otel`."
    )
    run_folder: Path | None = Field(
        default=None, description="Folder of the workers' shared state, which the service sets for its workers."
    )
    verify: bool = Field(default=True, description="Whether to compare every file of a bundle with its checksum before it serves.")

    @field_validator("keys_file")
    @classmethod
    def _keys_can_be_read(cls, file: Path | None) -> Path | None:
        if file is not None:
            read_keys(file)
        return file

    @field_validator("max_timeout_ms")
    @classmethod
    def _default_is_allowed(cls, max_timeout_ms: float, info: ValidationInfo) -> float:
        if max_timeout_ms < info.data.get("timeout_ms", max_timeout_ms):
            raise ValueError(f"at least ESPALIER_TIMEOUT_MS, {info.data['timeout_ms']:g}")
        return max_timeout_ms

    @model_validator(mode="before")
    @classmethod
    def _no_misspelt_keys(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Refuse a misspelt variable for a key, a CA or an address: it would leave open what it should protect."""
        for name, nearest in unknown_settings(os.environ).items():
            is_protective = re.search("KEY|TLS", name.upper()) or re.search("_KEYS?$|_TLS_|_ADMIN_", nearest or "")
            if name != CLIENTS_KEY and is_protective:
                raise ValueError(f"{name}: no such setting, so it would protect nothing; {_hint(nearest)}")
        return values

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
    def _store_is_polled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Poll the models folder if versions come from a store, because no admin request loads them."""
        return values | {"poll_s": 1.0} if values.get("store") and values.get("poll_s") is None else values

    @property
    def private_host(self) -> str:
        """The host of the address that answers `private` routes."""
        return self.host if self.admin_address is None else split_address(self.admin_address)[0]

    @property
    def certificates(self) -> tls.Certificates | None:
        """New certificates for the service's own addresses; None: it does not speak TLS."""
        pair = _pair(self.tls_certificate, self.tls_key, "ESPALIER_TLS_CERTIFICATE", "ESPALIER_TLS_KEY")
        return None if pair is None else tls.certificates_of_service(*pair, self.tls_client_ca)

    @property
    def client_certificates(self) -> tls.Certificates:
        """New certificates for calls to other services."""
        pair = _pair(self.tls_client_certificate, self.tls_client_key, "ESPALIER_TLS_CLIENT_CERTIFICATE", "ESPALIER_TLS_CLIENT_KEY")
        return tls.calling(self.tls_ca, *(pair or (None, None)))


def _pair(certificate: Path | None, key: Path | None, *names: str) -> tuple[Path, Path] | None:
    if (certificate is None) != (key is None):
        raise ValueError(f"both of {' and '.join(names)}, or neither")
    return None if certificate is None or key is None else (certificate, key)


def unknown_settings(environment: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that look like settings but are not → the setting with the nearest name, or None."""
    settings = {PREFIX + name.upper() for name in Settings.model_fields}
    unknown: dict[str, str | None] = {}
    for name, value in environment.items():
        upper = name.upper()
        is_link = _SERVICE_LINK.fullmatch(upper) or (upper.endswith("_PORT") and re.match("(tcp|udp|sctp)://", value))
        if upper.startswith(PREFIX) and value and upper not in settings and upper != SHARD_STORE and not is_link:
            names = [] if name == CLIENTS_KEY else [setting.removeprefix(PREFIX) for setting in settings]
            nearest = difflib.get_close_matches(upper.removeprefix(PREFIX), names, 1)
            unknown[name] = PREFIX + nearest[0] if nearest else None
    return unknown


def warn_of_unknown_settings(settings: Settings) -> None:
    """Log the variables that look like settings and have no effect."""
    for name, nearest in unknown_settings(os.environ).items():
        if name != CLIENTS_KEY or not settings.retrieve_keys:
            log.warning("%s is no setting and has no effect; %s", name, _hint(nearest))


def _hint(setting: str | None) -> str:
    return "`espalier serve --help` lists all settings" if setting is None else f"the nearest is {setting}"


def refusals(error: ValidationError) -> list[str]:
    """The errors in settings, one a line. No line shows a key."""
    lines = []
    for detail in error.errors(include_url=False):
        if not detail["loc"]:
            lines.append(expectation(detail))
            continue
        name = str(detail["loc"][0])
        secret = "a key" if name.endswith(("_key", "_keys")) else "a URL" if name in ("store", "backup") else None
        lines.append(f"{PREFIX}{name.upper()}: got {secret or repr(detail['input'])}, expected {expectation(detail)}")
    return lines


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address to listen on."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def metrics_folder(run_folder: Path) -> Path:
    """The folder of the metrics that the workers of a run folder share."""
    return run_folder / "metrics"
