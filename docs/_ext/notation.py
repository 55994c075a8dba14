"""The directive `notation`: one table of symbols, read from `reference/notation.toml`."""

import tomllib
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective


class Notation(SphinxDirective):
    """Shows the group of symbols that the argument names."""

    required_arguments = 1

    def run(self):
        """Builds the table from the file's rows."""
        path = Path(self.env.srcdir) / "reference" / "notation.toml"
        self.env.note_dependency(str(path))
        rows = tomllib.loads(path.read_text())[self.arguments[0]]
        lines = ["| symbol | code name | meaning | unit |", "|---|---|---|---|"]
        lines += [
            f"| ${r['symbol']}$ | `{r['code']}` | {r['meaning']} | {r.get('unit', '')} |"
            for r in rows
        ]
        container = nodes.Element()
        self.state.nested_parse(StringList(lines, source=str(path)), self.content_offset, container)
        return container.children


def setup(app):
    """Adds the directive."""
    app.add_directive("notation", Notation)
    return {"parallel_read_safe": True}
