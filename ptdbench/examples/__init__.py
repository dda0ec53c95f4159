"""Minimal programs to learn from."""
