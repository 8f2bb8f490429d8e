"""Items whose users are alike, though few have both: the nearest by the cosine of co-occurrence embeddings.

    near(a, b) = cos(e_a, e_b)²  for the NEAREST items b of a with a cosine above 0,   e of `item_embeddings`, WIDTH columns

Counts of pairs tell nothing of two items that no user had together; in sparse logs these are most pairs. Up to EXACT items, every cosine is
computed. With more items, only cosines within an item's group and with the PROBED nearest groups: groups of about GROUP items come from a
few rounds of spherical k-means. All items together keep at most MOST_PAIRS.

Knows embeddings. Does not know how the cosines are used.

Legend: I items, D embedding width, G groups, R rows of a block, C candidates, K nearest items of each, N pairs.
"""

from __future__ import annotations

import numpy as np

from espalier.arrays import Array, Float32, Int64
from espalier.compiled_code import compiled

from ..data.interactions import Interactions
from ..neighbours.neighbour_lists import Pairs
from ..retrieval.scores import keep_best
from ..trees.embeddings import item_embeddings
from ..trees.kmeans import unit_rows

WIDTH, NEAREST = 96, 256
MOST_PAIRS, LEAST_NEAREST = 1 << 25, 16
EXACT, GROUP, PROBED = 1 << 15, 1 << 10, 8
"""All cosines of 32,768 items take some ten seconds on a core; those of the groups of 300,000 items half a minute."""
ROUNDS = 4
BLOCK_SCORES = 1 << 24
"""Cosines that are held at a time, 64 MiB."""


def near_items(interactions: Interactions, users: Int64, seed: int) -> Pairs:
    """The near items by the lists of some users, nearest first. An item that is in no list has none."""
    width = min(WIDTH, len(users) - 1, interactions.item_count - 1)
    if width < 1:
        return Pairs(np.zeros(interactions.item_count + 1, np.int64), np.empty(0, np.int32), np.empty(0, np.float32))
    return nearest(item_embeddings(interactions, users, width, seed=seed), seed=seed)


def nearest(embeddings_ID: Float32, *, seed: int) -> Pairs:
    """The items nearest to each, ties by the lower row; rows of zeros have none."""
    items = len(embeddings_ID)
    embedded, unit_ID = np.flatnonzero(embeddings_ID.any(1)), unit_rows(embeddings_ID)
    most = min(NEAREST, max(LEAST_NEAREST, MOST_PAIRS // max(1, items)))
    item_IK, cosine_IK = np.full((items, most), -1, np.int64), np.zeros((items, most))
    for members, candidates in _groups(unit_ID, embedded, seed):
        candidate_CD = unit_ID[candidates]
        size = max(1, BLOCK_SCORES // len(candidates))
        for begin in range(0, len(members), size):
            block = members[begin : begin + size]
            _keep_nearest(block, candidates, unit_ID[block] @ candidate_CD.T, item_IK, cosine_IK)
    is_near_IK = item_IK >= 0
    offset_I1 = np.concatenate([[0], np.cumsum(is_near_IK.sum(1))]).astype(np.int64)
    return Pairs(offset_I1, item_IK[is_near_IK].astype(np.int32), np.square(cosine_IK[is_near_IK]).astype(np.float32))


def _groups(unit_ID: Float32, embedded: Int64, seed: int) -> list[tuple[Int64, Int64]]:
    """For each group, its items and the candidates for their nearest items, ascending."""
    if len(embedded) <= EXACT:
        return [(embedded, embedded)] if len(embedded) else []
    rng = np.random.default_rng(seed)
    centre_GD = unit_ID[np.sort(rng.choice(embedded, max(1, len(embedded) // GROUP), replace=False))]
    for _ in range(ROUNDS):
        group_I = _nearest_centres(unit_ID, embedded, centre_GD)
        total_GD = np.zeros_like(centre_GD)
        np.add.at(total_GD, group_I, unit_ID[embedded])
        length_G1 = np.linalg.norm(total_GD, axis=1, keepdims=True)
        centre_GD = np.where(length_G1 > 0, total_GD / np.maximum(length_G1, 1e-12), centre_GD)
    order = np.argsort(group_I := _nearest_centres(unit_ID, embedded, centre_GD), kind="stable")
    members_G = np.split(embedded[order], np.cumsum(np.bincount(group_I, minlength=len(centre_GD)))[:-1])
    probed_GP = np.argsort(-(centre_GD @ centre_GD.T), axis=1, kind="stable")[:, : 1 + PROBED]
    return [
        (members, np.sort(np.concatenate([members_G[other] for other in probed_P])))
        for members, probed_P in zip(members_G, probed_GP.tolist(), strict=True)
        if len(members)
    ]


def _nearest_centres(unit_ID: Float32, embedded: Int64, centre_GD: Float32) -> Int64:
    """int64[embedded]: the centre with the largest cosine, the first of equals."""
    size = max(1, BLOCK_SCORES // len(centre_GD))
    blocks = [embedded[begin : begin + size] for begin in range(0, len(embedded), size)]
    return np.concatenate([(unit_ID[block] @ centre_GD.T).argmax(1) for block in blocks])


@compiled()
def _keep_nearest(members: Array, candidates: Array, cosine_RC: Array, item_IK: Array, cosine_IK: Array) -> None:
    """The best candidates of each member with a cosine above 0, itself left out, to its rows."""
    for r in range(len(members)):
        item = members[r]
        for c in range(len(candidates)):
            if candidates[c] == item or not cosine_RC[r, c] > 0:
                cosine_RC[r, c] = -np.inf
        keep_best(candidates, cosine_RC[r], len(candidates), item_IK[item], cosine_IK[item])
