"""Lets docstrings write code in single backticks, as the pages do."""

import inspect
import re
import typing


# Left as they are: lines of an example, the text of a role, code in double backticks, links.
SPANS = re.compile(
    r"(?P<keep>^\s*(?:>>>|\.\.\.).*$|:[\w:.+-]+:`[^`]*`|``[^`]*``|`[^`]*`__?)|`(?P<code>[^`]+)`(?P<next>\w?)",
    re.MULTILINE,
)
FIELD_ALIAS = "Alias for field number"


def _double(match: re.Match) -> str:
    if match["keep"] is not None:
        return match["keep"]
    return f"``{match['code']}``" + (rf"\ {match['next']}" if match["next"] else "")


def single_backticks(app, what, name, obj, options, lines):
    """Doubles the backticks of a code span."""
    lines[:] = SPANS.sub(_double, "\n".join(lines)).split("\n")


def keep_values(app):
    """Keeps napoleon from taking the summary of a property, up to its colon, for a type."""
    values, before = ("property", "attribute", "data"), {}

    def save(app, what, name, obj, options, lines):
        if what in values:
            before[name] = list(lines)

    def restore(app, what, name, obj, options, lines):
        if what in values:
            lines[:] = before.pop(name)

    app.connect("autodoc-process-docstring", save, priority=200)
    app.connect("autodoc-process-docstring", restore, priority=900)


def skip_namedtuple_aliases(app, what, name, obj, skip, options):
    """Leaves out the fields of a NamedTuple that have no docstring of their own."""
    return True if (getattr(obj, "__doc__", None) or "").startswith(FIELD_ALIAS) else None


def plain_annotations(app, obj, bound_method):
    """Shows `Annotated[int, ...]`, which the command line reads, as `int`."""
    if inspect.isfunction(obj) and "Annotated" in str(obj.__annotations__):
        obj.__annotations__ = typing.get_type_hints(obj)


def setup(app):
    """Connects the hooks; the first runs before napoleon cuts the docstring into sections."""
    app.connect("autodoc-process-docstring", single_backticks, priority=100)
    keep_values(app)
    app.connect("autodoc-before-process-signature", plain_annotations)
    app.connect("autodoc-skip-member", skip_namedtuple_aliases)
    return {"parallel_read_safe": True}
