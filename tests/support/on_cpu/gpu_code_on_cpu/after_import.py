"""Hooks on imports: called when a module was executed, or around its execution. The standard library alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

After = Mapping[str, Callable[[], None]]
Around = Mapping[str, Callable[[], AbstractContextManager[None]]]


def install_hooks(*, after: After, around: Around) -> None:
    """Install hooks by the dotted names of modules, none of which may be imported yet."""
    sys.meta_path.insert(0, _Finder(after, around))


class _Finder(MetaPathFinder):
    def __init__(self, after: After, around: Around) -> None:
        self._after = after
        self._around = around

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._after and fullname not in self._around:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                assert spec.loader is not None
                spec.loader = _HookedLoader(
                    spec.loader, self._around.get(fullname, nullcontext), self._after.get(fullname, lambda: None)
                )
                return spec
        return None


class _HookedLoader(Loader):
    """The module's own loader in all else, of which some packages ask more than the import system does."""

    def __init__(
        self, own: Loader, around: Callable[[], AbstractContextManager[None]], after: Callable[[], None]
    ) -> None:
        self._own = own
        self._around = around
        self._hook = after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with self._around():
            self._own.exec_module(module)
        self._hook()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
