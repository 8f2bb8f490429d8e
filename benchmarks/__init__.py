"""Measurements, one folder a theme; what several of them or the tests need lies beside the folders.

`python -m benchmarks.NAME` runs the file NAME.py of one of the folders: they are searched for what is not here.
"""

from pathlib import Path

FOLDERS = ("papers/otm", "papers/product_search", "papers/xreg", "papers/nce", "quality", "speed", "service", "gpu")
__path__.extend(str(Path(__file__).parent / folder) for folder in FOLDERS)
