"""Logs and other tables in files, text or Parquet: their layout, their values, and what is wrong with them."""
