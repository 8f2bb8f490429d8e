"""The online side: a models folder served over HTTP. `espalier serve`; `create_app` in app.py is the ASGI application."""
