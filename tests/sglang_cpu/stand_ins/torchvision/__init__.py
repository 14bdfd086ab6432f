"""Stands in for `torchvision` (which pulls a CUDA build of torch): text-only models never call it."""

from any_submodule import stand_in

__version__ = "0.0.0"


class _Names(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Unusable(metaclass=_Names):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("torchvision is only stood in for")


__getattr__ = stand_in(__name__, lambda _name: _Unusable)
