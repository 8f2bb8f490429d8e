"""Tests. `make test` runs all of them; `tests/builders.py` makes small random models."""
