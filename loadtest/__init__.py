"""Load for a running service: the sweep over beam sizes (`espalier loadtest`) and Locust's user classes (`locustfile.py`)."""
