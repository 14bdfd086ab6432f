"""`import package.whatever` for a stand-in package, so that imports of the real one succeed."""

import importlib.abc
import importlib.machinery
import sys
import types


class AnySubmodule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers every import below `package` with a module whose attributes `attribute(dotted_name)` makes."""

    def __init__(self, package, attribute):
        self.package = package
        self.attribute = attribute

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(f"{self.package}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = self.getter(spec.name)
        return module

    def exec_module(self, module):
        pass

    def getter(self, name):
        """A module-level `__getattr__`; dunder names stay missing, since import machinery asks for them."""

        def getattr_(attribute):
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return self.attribute(f"{name}.{attribute}")

        return getattr_


def stand_in(package, attribute):
    """Install the finder; returns the package's own `__getattr__`."""
    finder = AnySubmodule(package, attribute)
    sys.meta_path.append(finder)
    return finder.getter(package)
