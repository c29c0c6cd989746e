"""Stands in for SGLang's kernels: every name in every submodule is something that fails if called.

SGLang imports dozens of them; on a CPU with ``attention_backend="torch_native"`` it calls none.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.4.10"
__path__: list[str] = []


class Missing:
    """A kernel, or an object that has some, such as ``scalar_types``."""

    def __init__(self, name: str) -> None:
        self.__name__ = name.rpartition(".")[2]
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{self._name}: there is no such kernel on this machine")

    def __getattr__(self, name: str) -> Any:
        return missing(f"{self._name}.{name}", name)


def missing(path: str, name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(path)


def __getattr__(name: str) -> Any:
    return missing(name, name)


class Submodule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - what makes a module a package

    def __getattr__(self, name: str) -> Any:
        return missing(f"{self.__name__}.{name}", name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Submodule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


sys.meta_path.append(Finder())
