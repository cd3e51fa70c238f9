"""Stands in for TorchTitan 0.3, which needs PyTorch. It has the classes and fields of its configuration, and nothing
else."""

__version__ = "0.3.0.stub"
