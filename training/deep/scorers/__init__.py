"""Node scorers: what makes a query state of a query, and a logit of a query state and a node row."""
