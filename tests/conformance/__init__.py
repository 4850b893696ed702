"""Every op, module and optimizer of PyTorch's own test databases, compared with plain torch: ``python -m tests.conformance``."""
