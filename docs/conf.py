"""Sphinx settings: every page is executed, warnings are errors, nothing is fetched."""

import os
import sys
from importlib.metadata import version as installed
from pathlib import Path


HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

# Kernels inherit these; they must be set before anything imports jax.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    # Programs of a page are small and run for seconds: compile them quickly rather than well.
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_use_fusion_emitters=false"
)
# Pages that train the same small model share its compiled programs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(HERE / "_build" / "jax_cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

from fingerprint import fingerprint


project = "diloco"
author = "The diloco developers"
copyright = "The diloco developers"
version = release = installed("diloco")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.bibtex",
    "api",
    "docstrings",
    "local_mathjax",
    "notation",
    "references",
]
exclude_patterns = ["_build", "_ext", "conf.py", "data/README.md", "**.ipynb_checkpoints"]
nitpicky = True
numfig = True

# Pages are MyST notebooks; tutorials may also be Python files in percent format.
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
# An output is reused only while nothing a page can read has changed: the fingerprint is part of the
# path, and a new path makes Sphinx read every page again.
nb_execution_mode = os.environ.get("NB_EXECUTION_MODE", "cache")
nb_execution_cache_path = str(HERE / "_build" / "jupyter_cache" / fingerprint(HERE.parent))
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_render_image_options = {"width": "100%"}

myst_enable_extensions = [
    "amsmath",
    "attrs_block",
    "attrs_inline",
    "colon_fence",
    "deflist",
    "dollarmath",
    "substitution",
]
myst_heading_anchors = 3
math_eqref_format = "Eq. {number}"

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
autosummary_generate = False
viewcode_follow_imported_members = False
add_module_names = False

bibtex_bibfiles = ["refs.bib"]
bibtex_reference_style = "author_year"
bibtex_default_style = "plain"

copybutton_selector = "div:not(.output) > div.highlight pre"
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "sphinx_book_theme"
html_title = "diloco"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["diloco.css"]
html_copy_source = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "navigation_with_keys": False,
    "navbar_persistent": [],
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}


def setup(app):
    """Points the source links of tutorials at `tutorials/`: `docs/tutorials` is a link to it."""

    def fix_tutorial_path(app, pagename, templatename, context, doctree):
        if pagename.startswith("tutorials/"):
            context["doc_path"] = ""

    app.connect("html-page-context", fix_tutorial_path)
