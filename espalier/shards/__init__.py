"""Shards: bundles with some of a bundle's subtrees each, and which shard has which subtrees."""
