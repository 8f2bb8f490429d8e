"""`python -m service`: one process that serves a models folder."""

from __future__ import annotations

import argparse
import logging
import math
import socket
import sys
from collections.abc import Sequence

import uvicorn
from pydantic import ValidationError

from espalier.errors import BundleNotFound
from service.app import create_app
from service.settings import Settings

log = logging.getLogger("service")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal says stop. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m service", description="Serve a models folder over HTTP.", epilog=_environment())
    parser.add_argument("--host", help="address to listen on (ESPALIER_HOST)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (ESPALIER_PORT)")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        settings = Settings(**given)
    except ValidationError as error:
        for wrong in error.errors():
            print(f"ESPALIER_{str(wrong['loc'][0]).upper()}: got {wrong['input']!r}: {wrong['msg']}", file=sys.stderr)
        return 1
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        app = create_app(settings)
        listening = listen(settings.host, settings.port)
    except (BundleNotFound, OSError) as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 1
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    log.info("listening on %s, documentation at %s/docs", url, url)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(settings.log_level)))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=math.ceil(settings.drain_s))
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        log.info("stopped")
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError, saying where."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it; without it answers can wait 40 ms for an ACK
    return listening


def _environment() -> str:
    names = ", ".join(f"ESPALIER_{name.upper()}" for name in Settings.model_fields)
    return f"Environment variables: {names}."


if __name__ == "__main__":
    sys.exit(main())
