"""How long tests of the router wait at most."""

PATIENCE_S = 60.0
