"""The online side: a models folder served over HTTP. `python -m service`; `create_app` in app.py is the ASGI application."""
