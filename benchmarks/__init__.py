"""Measurements, one folder a theme; what several of them need lies beside the folders.

`python -m benchmarks.NAME` runs benchmarks/THEME/NAME.py: the themes are searched for what is not here.
"""

from pathlib import Path

__path__.extend(str(Path(__file__).parent / theme) for theme in ("papers", "quality", "speed", "text", "service", "gpu"))
