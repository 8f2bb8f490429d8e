"""DSSM in the text-search benchmark: a small two-tower model over hashed words and trigrams, searched exactly and by HNSW."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.papers.product_search.ann import HnswIndex, faiss_is_installed
from benchmarks.papers.product_search.text_report import M, Trained, best
from benchmarks.papers.product_search.text_sets import WORD, Fold, Task
from espalier.arrays import Float32, Int64
from espalier.text.vectoriser import normalise

DIM, BUCKETS, BATCH = 128, 1 << 17, 512
EF_SEARCH = (100, 400)


@cache
def word_features(word: str) -> tuple[int, ...]:
    """The buckets of a word and of its character trigrams."""
    padded = f" {word} "
    grams = [f"w{word}", *(padded[k : k + 3] for k in range(len(padded) - 2))]
    return tuple(zlib.crc32(gram.encode()) % BUCKETS for gram in grams)


class TwoTowers(torch.nn.Module):
    """⟨q/‖q‖, v⟩ / τ with q = A·mean of the text's rows, v = B·mean of the item's own text's rows + a row of the item's own.

    As in Nigam et al. 2019 a shallow encoder with hashed words and trigrams, but with a softmax over the items of the batch, corrected by
    how often they come (Yi et al. 2019), and with the item's own row, without which items are only what they are called.
    """

    def __init__(self, items: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.rows = torch.nn.EmbeddingBag(BUCKETS, DIM, mode="mean", sparse=True)
        self.own = torch.nn.Embedding(items, DIM, sparse=True)
        torch.nn.init.normal_(self.rows.weight, std=0.1)
        torch.nn.init.zeros_(self.own.weight)
        self.of_query, self.of_item = torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM)
        self.temperature = 0.05

    def queries(self, bags: Sequence[Int64]) -> torch.Tensor:
        return torch.nn.functional.normalize(self.of_query(self._means(bags)), dim=1)

    def items(self, rows: Int64, bags: Sequence[Int64]) -> torch.Tensor:
        vectors: torch.Tensor = self.of_item(self._means(bags)) + self.own(torch.from_numpy(rows))
        return vectors

    def _means(self, bags: Sequence[Int64]) -> torch.Tensor:
        begin = np.cumsum([0, *map(len, bags)])[:-1]
        means: torch.Tensor = self.rows(torch.from_numpy(np.concatenate(bags)), torch.from_numpy(begin))
        return means


def bag_of(text: str) -> Int64:
    return np.array([f for word in WORD.findall(normalise(text)) for f in word_features(word)] or [0], np.int64)


def train_towers(task: Task, fold: Fold, item_bags: Sequence[Int64], cpu_s: float, most_epochs: int = 20) -> TwoTowers:
    """At most `cpu_s` CPU seconds, or epochs, over all training texts, each with one of its items at a time."""
    begin = time.process_time()
    model = TwoTowers(len(task.own_texts))
    bags = [bag_of(text) for text in fold.train.texts]
    first, labels = fold.train.labels.indptr, fold.train.labels.indices.astype(np.int64)
    counts = np.diff(first)
    pairs = np.repeat(np.arange(len(bags)), counts) * len(task.own_texts) + labels  # ascending
    often = np.bincount(labels, np.repeat(1 / counts, counts), len(task.own_texts)).clip(1e-3) / len(bags)
    log_often = torch.from_numpy(np.log(often)).float()
    sparse = torch.optim.SparseAdam([*model.rows.parameters(), *model.own.parameters()], lr=3e-3)
    dense = torch.optim.Adam([*model.of_query.parameters(), *model.of_item.parameters()], lr=1e-3)
    rng = np.random.default_rng(0)
    for epoch in range(most_epochs):
        order = rng.permutation(len(bags))
        losses: list[float] = []
        for start in range(0, len(order), BATCH):
            if time.process_time() - begin > cpu_s:
                print(f"  DSSM ends in epoch {epoch + 1}, {time.process_time() - begin:.0f} CPU s", flush=True)
                return model
            chosen = order[start : start + BATCH]
            rows = labels[first[chosen] + (rng.random(len(chosen)) * counts[chosen]).astype(np.int64)]
            queries, items = model.queries([bags[b] for b in chosen]), model.items(rows, [item_bags[row] for row in rows])
            wanted = chosen[:, None] * len(task.own_texts) + rows[None]
            right = pairs[np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)] == wanted
            np.fill_diagonal(right, False)
            logits = queries @ items.T / model.temperature - log_often[rows]
            loss = torch.nn.functional.cross_entropy(logits.masked_fill(torch.from_numpy(right), -1e9), torch.arange(len(rows)))
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
            losses.append(loss.item())
        print(f"  DSSM epoch {epoch + 1}: loss {np.mean(losses):.3f}, {time.process_time() - begin:.0f} CPU s", flush=True)
    return model


def dssm(cpu_s: float, task: Task, fold: Fold, folder: Path) -> list[Trained]:
    torch.set_num_threads(1)
    begin = time.process_time()
    item_bags = [bag_of(text) for text in task.own_texts]
    model = train_towers(task, fold, item_bags, cpu_s)
    items = len(task.own_texts)
    with torch.inference_mode():
        row_blocks = [np.arange(start, min(start + 4096, items)) for start in range(0, items, 4096)]
        vectors = np.concatenate([model.items(rows, [item_bags[row] for row in rows]).numpy() for rows in row_blocks])
    seconds = time.process_time() - begin

    def encode(text: str) -> Float32:
        with torch.inference_mode():
            return model.queries([bag_of(text)]).numpy()

    def exact(text: str) -> Int64:
        return best((encode(text) @ vectors.T)[0])

    mb = (vectors.nbytes + 4 * (BUCKETS * DIM + DIM * DIM + DIM)) / 1e6
    trained = [Trained("exact", exact, mb, seconds)]
    if not faiss_is_installed():
        print("dssm, HNSW is left out: faiss is not installed (pip install -e '.[ann]' -c constraints.txt)", flush=True)
        return trained
    begin = time.process_time()
    index = HnswIndex(vectors)
    seconds += time.process_time() - begin

    def near(effort: int, text: str) -> Int64:
        rows: Int64 = index.search(encode(text), M, effort)[0]
        return rows

    mb += items * 4 * (1 + 2 * 32) / 1e6  # 64 links of an item on the lowest layer
    return trained + [Trained(f"HNSW, efSearch {effort}", partial(near, effort), mb, seconds) for effort in EF_SEARCH]
