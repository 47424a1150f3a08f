"""How Sphinx builds the pages of this folder: `make docs`."""

import zeroresize as zr

project = "zeroresize"
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
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes that are properties, too, are shown once

html_theme = "furo"
html_title = f"zeroresize {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
