"""Chooses a live item's parents and its row. `placer.py` is the entry point; the other files are its parts."""
