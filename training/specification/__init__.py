"""Configurations: the checked keys of every kind of model and ranker, with their defaults and meaning."""
