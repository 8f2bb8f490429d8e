"""A model and everything that it is compared with: trained on one log, measured on the same queries, and what to make of it."""
