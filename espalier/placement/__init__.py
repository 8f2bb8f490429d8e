"""Where a live item goes and with what row: `placer.py` is the door, the others are what it is made of."""
