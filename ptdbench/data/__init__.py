"""Training data: endless streams of numbered samples, the same for every layout."""
