"""A trained bundle in parts: `espalier shard`."""
