"""ptdbench: which way of parallelising a PyTorch model is fastest on the machine at hand."""
