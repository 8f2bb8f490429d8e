"""Tests, in folders that mirror the packages. CONTRIBUTING.md says which ones a command runs."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Of the repository."""
