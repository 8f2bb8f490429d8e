"""Descriptors of a process: how many it needs for everything but connections, and how many connections that leaves room for.

The system's limit (`ulimit -n`) is raised as far as it may be. Knows numbers. Does not know what a connection is.
"""

from __future__ import annotations

import logging
import resource
from contextlib import suppress

from espalier.bundle import find_versions
from espalier.errors import InvalidData
from espalier.serving import Serving
from service.http.connections import RESERVE
from service.models.desired_state import DesiredState
from service.settings import Settings

log = logging.getLogger(__name__)

OWN, MODEL, VERSION = 48, 8, 5
"""Descriptors of a process without a model (38 were counted in a worker), and of each model and each version."""
SPARE = 16
"""Beside those that are open: for a version that is loaded beside the others, and for files that are read."""
LEAST_CONNECTIONS = 16
"""Room for fewer is no service."""


class TooFewDescriptors(OSError):
    """The system gives the process fewer descriptors than a service needs."""


def needed(settings: Settings) -> int:
    """About how many descriptors a process has open, besides connections, when everything that should serve does."""
    found = find_versions(settings.models)
    count = OWN
    for name in found:
        serving = None
        with suppress(InvalidData):
            serving = DesiredState(settings.models / name).read(Serving)
        count += MODEL + VERSION * (1 if serving is None else len(serving.versions))
    return count


def check_descriptors(settings: Settings) -> None:
    """Raise TooFewDescriptors where the process may not have enough of them to serve LEAST_CONNECTIONS."""
    own = needed(settings)
    least = own + LEAST_CONNECTIONS * 3 // 2
    soft = _raised(least)
    if soft != resource.RLIM_INFINITY and soft < least:
        raise TooFewDescriptors(
            f"the process may have {soft} open files (ulimit -n), expected at least {least}: {own} for the models and for itself, the rest "
            f"for {LEAST_CONNECTIONS} connections; {own + settings.max_connections + 2 * RESERVE} for all of ESPALIER_MAX_CONNECTIONS. "
            "Raise the limit: ulimit -n, LimitNOFILE= of systemd, --ulimit nofile= of containers"
        )


def most_connections(requested: int, others: int) -> int:
    """`requested`, or as many connections as the process has descriptors for beside `others`."""
    soft = _raised(requested + 2 * RESERVE + others)
    room = soft - others
    if soft == resource.RLIM_INFINITY or room >= requested + 2 * RESERVE:
        return requested
    # with a reserve of a quarter at most, twice
    return max(min(requested, room - 2 * RESERVE if room >= 6 * RESERVE else room * 2 // 3), 1)


def _raised(wanted: int) -> int:
    """The limit of descriptors, after it was raised to `wanted` or as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
