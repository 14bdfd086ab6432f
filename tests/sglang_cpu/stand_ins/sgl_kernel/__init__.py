"""Stands in for the CUDA package `sgl_kernel`. On a CPU SGLang only imports it; an op that is really called raises."""

from any_submodule import stand_in

__version__ = "0.4.10"


class _Op:
    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} was called on a CPU: only a stand-in is installed")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Op(f"{self.__name__}.{name}")

    def __hash__(self):
        return hash(self.__name__)

    def __eq__(self, other):
        return isinstance(other, _Op) and other.__name__ == self.__name__


__getattr__ = stand_in(__name__, _Op)
