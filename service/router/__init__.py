"""The router: the ordinary service over bundles that are cut into shards, with an engine that asks these."""
