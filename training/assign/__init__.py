"""`espalier assign`: for every item, the points that it is most relevant to."""
