"""Training objectives: one module per published loss.

Each is a function from a batch to (loss summed over levels and nodes, averaged over instances). They share the node scorer, the tree
and the levels' bookkeeping in `levels.py`.
"""
