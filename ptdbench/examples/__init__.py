"""The shortest programs one can learn from."""
