"""Extreme classifiers of other papers: points with labels in, a predictor of labels out."""
