"""The command `espalier`: one command for the trainer, the service and the load test."""
