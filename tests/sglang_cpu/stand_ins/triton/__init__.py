"""Stands in for `triton` (1 GB): decorators return what they decorate, everything else is an inert name."""

from any_submodule import stand_in

__version__ = "3.0.0"


def cdiv(a, b):
    return -(a // -b)


def next_power_of_2(n):
    return 1 << (n - 1).bit_length() if n > 0 else 1


class _InertClass(type):
    """Class names are real classes, so that they can be subclassed and used in annotations."""

    def __getattr__(cls, name):
        return _child(cls.__name__, name)


class _Inert:
    def __init__(self, name):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __getattr__(self, name):
        return _child(self.__name__, name)


def _child(parent, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _attribute(f"{parent}.{name}")


def _attribute(dotted):
    leaf = dotted.rpartition(".")[2]
    if leaf[:1].isupper():
        return _InertClass(leaf, (), {"__init__": lambda self, *args, **kwargs: None})
    return _Inert(dotted)


__getattr__ = stand_in(__name__, _attribute)
