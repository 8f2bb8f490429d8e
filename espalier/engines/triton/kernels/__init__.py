"""The Triton kernels of the `triton` engine, one file a step of the search. They know arrays on a device, neither bundles nor requests.

Tiles have one size, and what is in a row of one does not depend on the other rows, so a query's answer does not depend on the batch.
"""
