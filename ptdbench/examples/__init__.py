"""A model to start one of your own from."""
