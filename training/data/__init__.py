"""Interaction logs, their splits and the embedded sample."""
