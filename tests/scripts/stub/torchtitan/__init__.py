"""Stands in for TorchTitan 0.3, which needs PyTorch: its configuration's classes and fields, with nothing behind them."""

__version__ = "0.3.0.stub"
