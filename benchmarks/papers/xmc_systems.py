"""The systems of `benchmarks.xmc`: each is a configuration that `python -m training fit` takes. Nothing in them was chosen on a test set.

espalier        the defaults: C and γ chosen at fit on held-out training points
espalier-fixed  what the defaults were before: C = 1, γ = .5 and always a tree
ova             one-versus-all: every label a child of the root, C chosen as ours is
dismec          one-versus-all as DiSMEC has it: squared hinge, C = 1, weights below .01 dropped (Babbar and Schölkopf 2017, §2.1)
parabel         one tree of Parabel (Prabhu et al. 2018): balanced 2-means, leaves of 100 labels, squared hinge with C = 1, squared-hinge
                activation, path products, weights below .1 dropped
"""

from __future__ import annotations

from typing import Any

Raw = dict[str, Any]

MODELS: dict[str, Raw] = {
    "espalier": {},
    "espalier-fixed": {"tree": {"max_leaf": 32}, "linear": {"cost": 1.0, "gamma": 0.5}},
    "ova": {"linear": {"gamma": 1.0}},
    "dismec": {"linear": {"cost": 1.0, "gamma": 1.0, "prior": 0.0, "threshold": 0.01}},
    "parabel": {
        "tree": {"branching": 2, "max_leaf": 100},
        "linear": {"cost": 1.0, "gamma": 1.0, "prior": 0.0, "threshold": 0.1, "negatives": "teacher", "activation": "l2-hinge"},
    },
}
ONE_NODE = ("ova", "dismec")
"""Systems without inner nodes."""


def configuration(system: str, data: Raw, labels: int) -> Raw:
    """The configuration of a system over some labels, whose data section is `data`."""
    raw: Raw = {"kind": "xr-linear", "name": "xmc", "data": data, **MODELS[system]}
    return raw | {"tree": {"max_leaf": max(2, labels)}} if system in ONE_NODE else raw
