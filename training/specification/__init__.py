"""What is to be trained: the keys of every kind of model and ranker, checked, with their defaults and meaning."""
