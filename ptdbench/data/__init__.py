"""What a model is trained on: endless streams of numbered samples, the same for every layout."""
