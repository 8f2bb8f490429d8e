"""A trained bundle in parts: `python -m training shard`."""
