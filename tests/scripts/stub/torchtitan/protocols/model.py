from dataclasses import dataclass


class ModelConfigConverter:
    @dataclass(kw_only=True)
    class Config:
        def build(self):
            raise ImportError("torchao is not installed")
