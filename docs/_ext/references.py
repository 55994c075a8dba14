"""Resolves names in docstrings against the installed packages: `-n -W` needs no list of exceptions.

A type such as `jax.Array` has no page here. If it really exists it is shown without a link; if it
does not, the warning stays and fails the build. A public alias such as `diloco.init` leads to the
page of its module.
"""

import builtins
import importlib
import inspect

from docutils import nodes
from sphinx.util.nodes import make_refnode


def find(target: str):
    """Returns the object with this dotted name, or None."""
    head, *rest = target.split(".")
    if hasattr(builtins, head):
        obj = getattr(builtins, head)
    else:
        try:
            obj = importlib.import_module(head)
        except ImportError:
            return None
    name = head
    for part in rest:
        name += "." + part
        try:
            obj = getattr(obj, part)
        except AttributeError:
            try:
                obj = importlib.import_module(name)
            except ImportError:
                # A type of an extension module may name a path that cannot be imported.
                return getattr(importlib.import_module(head), rest[-1], None)
    return obj


def resolve(app, env, node, contnode):
    """Handles `missing-reference` of the Python domain."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    module = node.get("py:module")
    obj = None
    for name in (target, f"{module}.{target}" if module else "", f"diloco.{target}"):
        obj = find(name) if name else None
        if obj is not None:
            break
    if obj is None:
        return None
    home, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    documented = env.get_domain("py").objects
    for full in (f"{home}.{name}", getattr(obj, "__name__", "")):
        if full in documented:
            entry = documented[full]
            return make_refnode(
                app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, full
            )
    own = (
        home is not None
        and home.startswith("diloco")
        and (inspect.isroutine(obj) or inspect.isclass(obj))
    )
    if own and not name.startswith("_"):
        return None  # a public name of ours without an entry: let the warning stand
    return public_text(target, obj, contnode)


def public_text(target: str, obj, contnode):
    """Shows `optax._src.base.GradientTransformation` as `optax.GradientTransformation`."""
    package, name = target.split(".")[0], target.split(".")[-1]
    if "._" not in target or getattr(importlib.import_module(package), name, None) is not obj:
        return contnode
    text = nodes.Text(f"{package}.{name}")
    if isinstance(contnode, nodes.Text):
        return text
    shown = contnode.copy()
    shown += text
    return shown


def setup(app):
    """Connects the hook."""
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
