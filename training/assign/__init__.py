"""`python -m training assign`: for every item, the points that it is most relevant to."""
