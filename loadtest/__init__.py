"""Load for a running service: the sweep over beam sizes (`python -m loadtest.sweep`) and Locust's user classes (`locustfile.py`)."""
