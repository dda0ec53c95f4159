"""ptdbench: which way of parallelizing a PyTorch model is fastest on the machine at hand."""
