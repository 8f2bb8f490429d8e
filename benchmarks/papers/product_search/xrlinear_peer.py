"""One peer of `benchmarks.xrlinear_peers`, run by a Python of its own: python xrlinear_peer.py PEER FOLDER STEP BEAMS

FOLDER holds NAME-points.npz and NAME-labels.npz for train and test, as scipy.sparse saves them, and train.txt in the XMC text format.
Steps, each a process of its own; the last line of what they print is JSON:

    train   writes the model to FOLDER/PEER and FOLDER/PEER-BEAM.npy, labels [B, M]: {"train_cpu_s", "model_mb", "trees"}
    time    {BEAM: {"ms_p50", "queries_per_s"}}
    memory  {"batch_mb"}: the growth of the process during a search of all test points at one beam

Needs NumPy, SciPy and the peer, and nothing of Espalier: some peers need an older NumPy. One thread.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp

M = 100
SINGLE = 1000
"""Queries that are timed one by one."""


def cpu_seconds() -> float:
    usage, children_usage = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime + children_usage.ru_utime + children_usage.ru_stime


def load(folder: Path, name: str) -> tuple[Any, Any]:
    """float32 matrices of points and of labels."""
    return sp.load_npz(folder / f"{name}-points.npz"), sp.load_npz(folder / f"{name}-labels.npz")


class Pecos:
    """XR-Linear, with as many models from different seeds as `trees`; they are searched as compiled memory-mapped models."""

    trees = 1

    def train(self, folder: Path, x: Any, y: Any) -> None:
        from pecos.xmc import Indexer, LabelEmbeddingFactory
        from pecos.xmc.xlinear.model import XLinearModel

        features = LabelEmbeddingFactory.create(y, x, method="pifa", threads=1)
        for seed in range(self.trees):
            chain = Indexer.gen(features, indexer_type="hierarchicalkmeans", threads=1, seed=seed)
            XLinearModel.train(x, y, C=chain, threads=1).save(str(self.folder(folder) / str(seed)))

    def load(self, folder: Path) -> None:
        from pecos.xmc.xlinear.model import XLinearModel

        self.models = []
        for seed in range(self.trees):
            mapped = folder / f"{self.folder(folder).name}-mapped-{seed}"
            if not mapped.is_dir():
                XLinearModel.compile_mmap_model(str(self.folder(folder) / str(seed)), str(mapped))
            self.models.append(XLinearModel.load(str(mapped), is_predict_only=True, lazy_load=False))

    def folder(self, folder: Path) -> Path:
        return folder / ("pecos" if self.trees == 1 else f"pecos-{self.trees}")

    def prepared(self, x: Any) -> Any:
        return x

    def predict(self, queries: Any, beam: int, m: int) -> Any:
        """Labels with the sums of their scores; of one model the best m. PECOS's own CsrEnsembler takes .4 ms a query longer."""
        first, *others = (model.predict(queries, beam_size=beam, only_topk=m, threads=1) for model in self.models)
        return sum(others, first)

    def many(self, queries: Any, beam: int) -> Any:
        label_scores = self.predict(queries, beam, M)
        out = np.full((queries.shape[0], M), -1)
        for i in range(queries.shape[0]):
            begin, end = label_scores.indptr[i], label_scores.indptr[i + 1]
            best = label_scores.indices[begin:end][np.argsort(-label_scores.data[begin:end], kind="stable")][:M]
            out[i, : len(best)] = best
        return out

    def timed(self, queries: Any, beam: int) -> None:
        label_scores = self.predict(queries, beam, 10)
        if self.trees > 1:
            for begin, end in itertools.pairwise(label_scores.indptr):
                label_scores.indices[begin:end][np.argsort(-label_scores.data[begin:end])[:10]]


class Pecos3(Pecos):
    trees = 3


class Omikuji:
    """Parabel's trees."""

    name = "omikuji"
    trees = 1
    options: ClassVar[dict[str, Any]] = {}

    def train(self, folder: Path, x: Any, y: Any) -> None:
        import omikuji

        parameters = omikuji.Model.default_hyper_param()
        parameters.n_trees = self.trees
        for name, value in self.options.items():
            setattr(parameters, name, value)
        omikuji.Model.train_on_data(str(folder / "train.txt"), parameters, n_threads=1).save(str(folder / self.name))

    def load(self, folder: Path) -> None:
        import omikuji

        self.model = omikuji.Model.load(str(folder / self.name))
        self.model.init_prediction_thread_pool(1)

    def prepared(self, x: Any) -> Any:
        return [list(zip(x.indices[a:b].tolist(), x.data[a:b].tolist(), strict=True)) for a, b in itertools.pairwise(x.indptr)]

    def many(self, queries: Any, beam: int) -> Any:
        out = np.full((len(queries), M), -1)
        for i, query in enumerate(queries):
            labels = [label for label, _ in self.model.predict(query, beam_size=beam, top_k=M)]
            out[i, : len(labels)] = labels
        return out

    def timed(self, queries: Any, beam: int) -> None:
        for query in queries:
            self.model.predict(query, beam_size=beam, top_k=10)


class Omikuji3(Omikuji):
    name, trees = "omikuji-3", 3


class Bonsai(Omikuji):
    name = "bonsai"
    options: ClassVar[dict[str, Any]] = {"cluster_k": 100, "cluster_balanced": False}


class Bonsai3(Bonsai):
    name, trees = "bonsai-3", 3


class Napkinxc:
    trees = 1

    def train(self, folder: Path, x: Any, y: Any) -> None:
        from napkinxc.models import PLT

        model = PLT(str(folder / "napkinxc"), threads=1, seed=0)
        model.fit(x, [y.indices[a:b].tolist() for a, b in itertools.pairwise(y.indptr)])

    def load(self, folder: Path) -> None:
        self.folder = folder / "napkinxc"
        self.models: dict[int, Any] = {}

    def at(self, beam: int) -> Any:
        from napkinxc.models import PLT

        if beam not in self.models:
            self.models = {beam: PLT(str(self.folder), threads=1, tree_search_type="beam", beam_search_width=beam)}
            self.models[beam].load()
        return self.models[beam]

    def prepared(self, x: Any) -> Any:
        return x

    def many(self, queries: Any, beam: int) -> Any:
        out = np.full((queries.shape[0], M), -1)
        for i, labels in enumerate(self.at(beam).predict(queries, top_k=M)):
            out[i, : len(labels[:M])] = labels[:M]  # it may return more than top_k
        return out

    def timed(self, queries: Any, beam: int) -> None:
        self.at(beam).predict(queries, top_k=10)


PEERS: dict[str, Any] = {
    "pecos": Pecos,
    "pecos-3": Pecos3,
    "omikuji": Omikuji,
    "omikuji-3": Omikuji3,
    "bonsai": Bonsai,
    "bonsai-3": Bonsai3,
    "napkinxc": Napkinxc,
}


def growth_mb(run: Any) -> float:
    """The largest growth of the process's resident memory while `run` runs (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    run()
    return round((_status("VmHWM") - before) / 1e3, 1)


def _status(field: str) -> int:
    """kB"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def train(system: Any, peer: str, folder: Path, beams: list[int]) -> dict[str, Any]:
    x, y = load(folder, "train")
    before = cpu_seconds()
    system.train(folder, x, y)
    report: dict[str, Any] = {"train_cpu_s": round(cpu_seconds() - before, 2), "trees": system.trees}
    report["model_mb"] = round(sum(file.stat().st_size for file in (folder / peer).rglob("*") if file.is_file()) / 1e6, 1)
    system.load(folder)
    everything = system.prepared(load(folder, "test")[0])
    for beam in beams:
        np.save(folder / f"{peer}-{beam}.npy", system.many(everything, beam))
    return report


def timed(system: Any, test: Any, beams: list[int]) -> dict[Any, Any]:
    everything = system.prepared(test)
    singles = [system.prepared(test[i]) for i in range(min(SINGLE, test.shape[0]))]
    report = {}
    for beam in beams:
        system.timed(singles[0], beam)
        times = []
        for query in singles:
            begin = time.perf_counter()
            system.timed(query, beam)
            times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        system.timed(everything, beam)
        report[beam] = {"ms_p50": 1e3 * float(np.median(times)), "queries_per_s": test.shape[0] / (time.perf_counter() - begin)}
    return report


def main() -> None:
    peer, folder, step, beams = sys.argv[1], Path(sys.argv[2]), sys.argv[3], [int(beam) for beam in sys.argv[4].split(",")]
    system = PEERS[peer]()
    report: dict[Any, Any]
    if step == "train":
        report = train(system, peer, folder, beams)
    else:
        system.load(folder)
        test, _ = load(folder, "test")
        if step == "time":
            report = timed(system, test, beams)
        else:
            everything = system.prepared(test)
            system.timed(system.prepared(test[0]), beams[0])
            report = {"batch_mb": growth_mb(lambda: system.timed(everything, beams[0]))}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
