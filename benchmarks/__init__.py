"""Measurements, one folder for each theme. Code that several benchmarks or the tests share lies beside the folders.

`python -m benchmarks.NAME` runs NAME.py of one of the folders, since Python searches them for modules that are not here.
"""

from pathlib import Path

FOLDERS = ("papers/otm", "papers/product_search", "papers/xreg", "papers/nce", "quality", "speed", "service", "gpu")
__path__.extend(str(Path(__file__).parent / folder) for folder in FOLDERS)
