"""Ways to build the first tree over a catalogue."""
