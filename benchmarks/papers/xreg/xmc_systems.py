"""The systems of `benchmarks.xmc` that are configurations which `python -m training fit` takes. Nothing in them was chosen on a test set.

espalier        the defaults: C and γ chosen at fit on held-out training points, and stacking where it finds more of those
espalier-trees  the same without stacking
espalier-fixed  what the defaults were before: C = 1, γ = .5, always a tree and no stacking
forest          three trees of `espalier`
ova             one-versus-all: every label a child of the root, C chosen as ours is, no stacking
dismec          one-versus-all as DiSMEC has it: squared hinge, C = 1, weights below .01 dropped (Babbar and Schölkopf 2017, §2.1)
parabel         one tree of Parabel (Prabhu et al. 2018): balanced 2-means, leaves of 100 labels, squared hinge with C = 1, squared-hinge
                activation, path products, weights below .1 dropped
parabel-3       three trees of it, as published
bonsai          the same with up to 100 children a node and leaves of 100 labels (Khandagale et al. 2020), three trees
xreg            XReg of inverse propensities, pointwise, with its own defaults: three trees
xreg-t          the same with a tail: the product, α = .5, as the authors' sample run has it
xreg-best       `forest`, whose stacking orders by p · w^power, p being the probability that a label is relevant, w its inverse propensity,
                and p · w its estimate of relevance
xreg-zero       xreg in its own order with values of almost 0, the same for all points: what a threshold loses by that (XReg, Table 3)

A system with some keys changed is written `xreg:tree.count=5:tree.max_leaf=50`, with values as in JSON.
"""

from __future__ import annotations

import json
from typing import Any

from espalier.errors import InvalidConfig
from training.specification.linear import LinearConfig
from training.specification.models import SPECIFICATION

Raw = dict[str, Any]

TREES: Raw = {"stacking": {"model": "none"}}
PARABEL: Raw = {"cost": 1.0, "gamma": 1.0, "prior": 0.0, "threshold": 0.1, "negatives": "teacher", "activation": "l2-hinge"}
MODELS: dict[str, Raw] = {
    "espalier": {},
    "forest": {"tree": {"count": 3}},
    "espalier-trees": TREES,
    "espalier-fixed": {"tree": {"max_leaf": 32}, "linear": {"cost": 1.0, "gamma": 0.5}, **TREES},
    "ova": {"linear": {"gamma": 1.0}, **TREES},
    "dismec": {"linear": {"cost": 1.0, "gamma": 1.0, "prior": 0.0, "threshold": 0.01}, **TREES},
    "parabel": {"tree": {"branching": 2, "max_leaf": 100}, "linear": PARABEL, **TREES},
    "parabel-3": {"tree": {"branching": 2, "max_leaf": 100, "count": 3}, "linear": PARABEL, **TREES},
    "bonsai": {"tree": {"branching": 100, "max_leaf": 100, "count": 3}, "linear": PARABEL, **TREES},
    "xreg": {"kind": "xreg", "relevance": {"source": "inverse-propensity"}},
    "xreg-zero": {"kind": "xreg", "relevance": {"source": "inverse-propensity"}},
    "xreg-t": {"kind": "xreg", "relevance": {"source": "inverse-propensity"}, "tail": {"form": "product", "alpha": 0.5}},
    "xreg-best": {
        "relevance": {"source": "inverse-propensity"},
        "tree": {"count": 3},
        "stacking": {"model": "network", "power": 0.3},
    },
}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
"""The environment of a system's process."""
ONE_NODE = ("ova", "dismec")
"""Systems without inner nodes."""
OF_RELEVANCE = ("xreg", "xreg-t", "xreg-best")
"""Systems whose scores estimate relevance over its maximum among training labels."""


def name_of(system: str) -> str:
    """The system's, without what is changed of it."""
    return system.partition(":")[0]


def configuration(system: str, data: Raw, labels: int) -> Raw:
    """The configuration of a system over some labels, whose data section is `data`. Raises InvalidConfig where a change has no value."""
    name, *changes = system.split(":")
    raw: Raw = {"kind": "xr-linear", "name": "xmc", "data": data, **MODELS[name]}
    raw = raw | {"tree": {"max_leaf": max(2, labels)}} if name in ONE_NODE else raw
    for change in changes:
        key, _, value = change.partition("=")
        section, _, option = key.partition(".")
        try:
            raw[section] = raw.get(section, {}) | {option: json.loads(value)}
        except ValueError:
            raise InvalidConfig("--systems", change, "SECTION.KEY=VALUE, the value as in JSON") from None
    return raw


def linear_config(raw: Raw) -> LinearConfig:
    """A configuration of linear scorers. Raises InvalidConfig."""
    config = SPECIFICATION.checked(raw)
    if not isinstance(config, LinearConfig):
        raise TypeError(f"{config.kind}: not linear")
    return config
