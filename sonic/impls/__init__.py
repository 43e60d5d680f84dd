"""Registry of implementations: one adapter file each, whose stem is the implementation's name everywhere.

An adapter defines a class `Impl` (see `sonic.impls._common.Adapter` for the members and what they mean). Listing the
names imports none of them, so a process without torch may ask.
"""

from __future__ import annotations

import importlib
import pkgutil


def names() -> list[str]:
    """Names of all implementations, sorted; imports no adapter."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> type:
    """The class `Impl` of the adapter `name`. ValueError for an unknown name, which lists the known ones."""
    if name not in names():
        raise ValueError(f"impl is {name!r}; known implementations: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}").Impl
