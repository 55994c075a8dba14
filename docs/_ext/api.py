"""Writes one API page for each module, so that no public name can be without an entry."""

import importlib
import pkgutil
from pathlib import Path

import diloco


ROOT_PAGE = """\
API
===

The names of the package
------------------------

.. currentmodule:: diloco

.. autosummary::

{names}

By module
---------

.. toctree::
   :maxdepth: 1

{modules}
"""

MODULE_PAGE = """\
{title}
{line}

.. automodule:: {module}
   :members:
   :ignore-module-all:
"""


def modules() -> list[str]:
    """Lists the package's modules that have something to show."""
    found = sorted(m.name for m in pkgutil.walk_packages(diloco.__path__, "diloco."))
    private = [m for m in found if any(part.startswith("_") for part in m.split("."))]
    empty = [m for m in found if not _has_members(importlib.import_module(m))]
    return [m for m in found if m not in private and m not in empty]


def _has_members(module) -> bool:
    own = (v for k, v in vars(module).items() if not k.startswith("_"))
    return any(getattr(v, "__module__", None) == module.__name__ for v in own)


def write_pages(app) -> None:
    """Writes the pages; an unchanged one is left alone, so that it is not read again."""
    folder = Path(app.srcdir) / "reference" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        f"{m}.rst": MODULE_PAGE.format(title=m, line="=" * len(m), module=m) for m in modules()
    }
    pages["index.rst"] = ROOT_PAGE.format(
        names="\n".join(f"   {n}" for n in getattr(diloco, "__all__", ())),
        modules="\n".join(f"   {m}" for m in modules()),
    )
    for old in folder.glob("*.rst"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        file = folder / name
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def setup(app):
    """Connects the hook."""
    app.connect("config-inited", lambda app, config: write_pages(app))
    return {"parallel_read_safe": True}
