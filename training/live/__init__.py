"""Live items in the next version of a model: folded into its tree, or trained with."""
