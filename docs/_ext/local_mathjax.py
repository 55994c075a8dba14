r"""MathJax 3 served with the site, from a wheel: formulas need no network and no Node.

Only what a page can load is copied. Undefined commands are errors (`noundefined` and `noerrors` are
off), which the browser test looks for; `check_formulas` finds the commonest ones during the build.
"""

import importlib.util
import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util import logging


logger = logging.getLogger(__name__)

PARTS = ("tex-chtml.js", "input/tex/extensions", "output/chtml/fonts/woff-v2")

# Shorthands for the pages; plain symbols such as \Theta stay plain LaTeX.
MACROS = {
    "E": r"\mathbb{E}",
    "R": r"\mathbb{R}",
    "norm": [r"\lVert #1 \rVert", 1],
    "mean": [r"\frac{1}{M}\sum_{m=1}^{M} #1", 1],
    "InnerOpt": r"\operatorname{InnerOpt}",
    "OuterOpt": r"\operatorname{OuterOpt}",
    "enc": r"\operatorname{enc}",
    "dec": r"\operatorname{dec}",
    "argmin": r"\operatorname*{arg\,min}",
}


def mathjax_folder() -> Path:
    """Returns the `es5` folder of the installed wheel."""
    spec = importlib.util.find_spec("mathjax")
    if spec is None:
        raise ExtensionError("django-static-mathjax is not installed; run: make setup")
    return Path(spec.submodule_search_locations[0]) / "static" / "mathjax" / "es5"


def copy_mathjax(app) -> None:
    """Puts MathJax beside the other static files of the site."""
    if app.builder.format != "html":
        return
    target = Path(app.outdir) / "_static" / "mathjax"
    for part in PARTS:
        source = mathjax_folder() / part
        if source.is_dir():
            shutil.copytree(source, target / part, dirs_exist_ok=True)
        elif not (target / part).exists():
            (target / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / part)


def check_formulas(app, doctree, docname) -> None:
    """Warns about an unknown command and about braces that do not match; `-W` makes it an error."""
    if not hasattr(app, "mathjax_words"):
        source = "".join(
            p.read_text() for p in sorted(mathjax_folder().glob("input/tex/extensions/*.js"))
        )
        source += (mathjax_folder() / "tex-chtml.js").read_text()
        app.mathjax_words = set(re.findall(r"[A-Za-z]+", source)) | set(MACROS)
    for node in doctree.findall(lambda n: isinstance(n, nodes.math | nodes.math_block)):
        tex = node.astext()
        bare = re.sub(r"\\[{}\\]", "", tex)
        if bare.count("{") != bare.count("}"):
            logger.warning("braces do not match in formula: %s", tex, location=node, type="math")
        for command in re.findall(r"\\([A-Za-z]+)", tex):
            if command not in app.mathjax_words:
                logger.warning(
                    "unknown command \\%s in formula: %s", command, tex, location=node, type="math"
                )


def setup(app):
    """Connects the hooks and sets MathJax's own configuration."""
    app.config.mathjax_path = "mathjax/tex-chtml.js"
    app.config.mathjax3_config = {
        "tex": {"macros": MACROS, "packages": {"[-]": ["noundefined", "noerrors"]}},
        "options": {
            "enableMenu": False,
            "processHtmlClass": "tex2jax_process|mathjax_process|math|output_area",
        },
    }
    app.connect("builder-inited", copy_mathjax)
    app.connect("doctree-resolved", check_formulas)
    return {"parallel_read_safe": True}
