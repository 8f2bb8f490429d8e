"""Models on object storage: content-addressed files, manifests, and which version should serve.

    blobs/sha256/<ab>/<hex>                 a file of a bundle, named by its SHA-256
    models/<name>/<version>/manifest.json   the bytes of the bundle's manifest, written last and never replaced
    models/<name>/serving.json              which versions should serve, as in a models folder; absent: the highest version

All of it lies under the path of the store's URL. Only objects.py uses the library that talks to stores.
"""
