"""Node scorers: they map a query to a query state, and a query state and a node row to a logit."""
