"""What starts the service on many machines. The service knows nothing of it."""
