"""Offline: logs to tree, node scorers and bundle."""

from espalier.hardware import limit_threads

limit_threads()  # before torch is imported
