"""Engines: one module per way of searching a bundle. `espalier.search.open_engine` chooses."""
