"""Item neighbours: what users' lists say about pairs of items. A baseline, and what a tree's memory is made of."""
