"""The Triton kernels of the GPU engines, one file for each step of a search. They know arrays on a device, neither bundles nor requests.

Tiles have a fixed size, and a row of a tile does not depend on the other rows, so a query's answer does not depend on the batch.
"""
