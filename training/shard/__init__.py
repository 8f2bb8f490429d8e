"""`espalier shard`: cuts a trained bundle into shards, and joins shards."""
