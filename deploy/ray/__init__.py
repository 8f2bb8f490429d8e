"""The service on Ray Serve: an ingress that is a router, and a deployment for each shard. README.md says how to run it."""
