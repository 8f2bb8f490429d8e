"""Offline: logs to tree, node scorers and bundle."""
