"""The command `espalier`: one name for what the trainer, the service and the load test do."""
