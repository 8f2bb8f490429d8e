"""Side-by-side measurements that anyone can run: `python -m benchmarks.NAME`."""
