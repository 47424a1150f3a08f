"""How Sphinx builds the pages of this folder: `make docs`."""

import zeroresize as zr

project = "zeroresize"
author = "the zeroresize authors"
release = version = zr.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as GitHub makes them, so links work in both places

autodoc_default_options = {"members": True, "member-order": "bysource"}
autosummary_generate = True
autosummary_ignore_module_all = False
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"zeroresize {version}"
