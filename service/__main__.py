"""`espalier serve`: serves a models folder, from one process or, on a CPU, several."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError

from espalier.compile import make_ready
from espalier.engines import gpu_usable, runs_on_gpu
from espalier.errors import BundleNotFound, DeviceUnavailable, InvalidConfig

from .app import create_app
from .models.registry import Registry
from .processes.server import Server, check_descriptors
from .processes.supervisor import Supervisor
from .settings import Settings, is_local, refusals, split_address, warn_of_unknown_settings
from .watch import logs
from .watch.metrics import Metrics
from .watch.tracing import TracingUnavailable

log = logging.getLogger("service")

BUFFER_BYTES = 256 << 10
"""Buffer size for each direction of a connection. Linux doubles it for its own book-keeping."""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m service") -> int:
    """Serve until a signal says stop. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description="Serve a models folder over HTTP.", epilog=environment())
    parser.add_argument("--host", help="address to listen on (ESPALIER_HOST)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (ESPALIER_PORT)")
    parser.add_argument("--workers", type=int, help="processes that serve, on a CPU (ESPALIER_WORKERS)")
    settings = settings_of(vars(parser.parse_args(arguments)))
    return 1 if settings is None else serve(settings, partial(create_app, settings))


def serve(settings: Settings, create: Callable[[], FastAPI]) -> int:
    """Serve the application that `create` makes, or the workers'. Returns the exit code; prints why the service cannot start."""
    logs.configure(settings.log_level, settings.log_format)
    warn_of_unknown_settings(settings)
    try:
        check_descriptors(settings)
        if settings.workers > 1:
            check_workers(settings)
            Registry(settings, Metrics())  # reports errors of the models folder once, before every worker would
            make_ready()  # once for all workers
            return Supervisor(settings, *listen_on(settings)).run()
        make_ready()
        Server(create(), settings).serve_on(*listen_on(settings))
    except (BundleNotFound, DeviceUnavailable, InvalidConfig, TracingUnavailable, OSError) as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 1
    log.info("stopped")
    return 0


def settings_of(options: Mapping[str, Any]) -> Settings | None:
    """The settings from the environment and from options that are not None. Prints errors and returns None if a setting is invalid."""
    try:
        return Settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        print("\n".join(refusals(error)), file=sys.stderr)
    return None


def check_workers(settings: Settings) -> None:
    """Raise DeviceUnavailable if several workers would share a GPU."""
    on_gpu = settings.device == "cuda" or runs_on_gpu(settings.engine)
    if not on_gpu and settings.device == "auto" and settings.engine is None:
        on_gpu = gpu_usable()
    if on_gpu:
        raise DeviceUnavailable(
            f"ESPALIER_WORKERS: got {settings.workers}, expected 1: one process owns the GPU. Several would each load every model into "
            "its memory and take turns on it; one process puts the queries of all connections into the same engine calls. To serve "
            "from several CPU workers, set ESPALIER_DEVICE=cpu"
        )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError, whose message has the address."""
    try:
        listening_socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # else they may grow to megabytes for each client that does not read
        listening_socket.setsockopt(socket.SOL_SOCKET, buffer, BUFFER_BYTES)
    listening_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # for all connections; else answers can wait 40 ms for an ACK
    return listening_socket


def listen_on(settings: Settings) -> list[socket.socket]:
    """Sockets on the service's address and, if there is one, on that of operators. Raises OSError, whose message has the address."""
    addresses: list[tuple[str, int]] = [(settings.host, settings.port)]
    if settings.admin_address is not None:
        host, port = split_address(settings.admin_address)
        addresses.append((host, port or 0))
    sockets = [listen(*address) for address in addresses]
    urls = [_url(listening_socket, "http" if settings.tls_certificate is None else "https") for listening_socket in sockets]
    log.info("listening on %s, documentation at %s/docs", " and for operators on ".join(urls), urls[-1])
    keys = settings.retrieve_keys, settings.write_keys, settings.admin_keys, settings.internal_keys
    for (host, _), url in zip(addresses, urls, strict=True):
        if not is_local(host) and not any(keys) and settings.keys_file is None:
            log.warning(
                "WITHOUT KEYS: everybody who can reach %s may retrieve%s. Set ESPALIER_RETRIEVE_KEYS or ESPALIER_KEYS_FILE to require keys",
                url,
                ", and see what people did (ESPALIER_OPEN)" if settings.open and url == urls[-1] else "",
            )
    return sockets


def _url(listening_socket: socket.socket, scheme: str) -> str:
    host, port = listening_socket.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def environment() -> str:
    """The names of the environment variables, for --help."""
    names = ", ".join(f"ESPALIER_{name.upper()}" for name in Settings.model_fields)
    return f"Environment variables: {names}."


if __name__ == "__main__":
    sys.exit(main())
