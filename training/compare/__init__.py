"""Compares a model with other methods: all train on one log and are measured on the same queries, and a verdict sums it up."""
