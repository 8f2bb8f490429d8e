"""Settings that all tests share."""

from hypothesis import settings

settings.register_profile("espalier", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("espalier")
