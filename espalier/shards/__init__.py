"""Shards: bundles that hold some of a bundle's subtrees each, and which of them holds what."""
