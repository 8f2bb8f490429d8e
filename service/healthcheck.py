"""A readiness check of the service on this machine, for container engines and probes that run a command: `python -m service.healthcheck`.
The exit status is 0 if the service is ready.

It reads a few settings itself, because importing all settings would take longer than the request. It does not check the service's
certificate, because no other process answers on the loopback interface. If clients must show a certificate, it shows that of
ESPALIER_TLS_CLIENT_CERTIFICATE, else the service's own.
"""

from __future__ import annotations

import argparse
import http.client
import os
import ssl
import sys
from collections.abc import Sequence

TIMEOUT_S = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m service.healthcheck", description="Ask the service on this machine how it is.")
    parser.add_argument("path", nargs="?", default="/readyz", help="/readyz (the default) or /livez")
    connection = _connection()
    try:
        connection.request("GET", parser.parse_args(arguments).path)
        return int(connection.getresponse().status != http.client.OK)
    except (OSError, http.client.HTTPException) as error:
        print(f"no answer: {error}", file=sys.stderr)
        return 1
    finally:
        connection.close()


def _connection() -> http.client.HTTPConnection:
    """A connection to the service. (urllib.request would use a proxy that the environment names.)"""
    port = os.environ.get("ESPALIER_PORT", "")
    address = "127.0.0.1", int(port) if port.isdecimal() else 8000
    certificate, key = os.environ.get("ESPALIER_TLS_CERTIFICATE"), os.environ.get("ESPALIER_TLS_KEY")
    if not certificate:
        return http.client.HTTPConnection(*address, timeout=TIMEOUT_S)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if client_certificate := os.environ.get("ESPALIER_TLS_CLIENT_CERTIFICATE"):
        certificate, key = client_certificate, os.environ.get("ESPALIER_TLS_CLIENT_KEY")
    context.load_cert_chain(certificate, key)
    return http.client.HTTPSConnection(*address, timeout=TIMEOUT_S, context=context)


if __name__ == "__main__":
    sys.exit(main())
