"""Configures Sphinx with MyST: pages in Markdown, the API reference from the docstrings. `make docs` fails on warnings.

The build needs no network, and checks links within the tree only. A reader's browser loads MathJax, which typesets the
formulas; without a network it shows their TeX.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, even if torch_gdn is not installed

import torch_gdn

project = "torch_gdn"
author = "the torch_gdn contributors"
project_copyright = author
version = release = torch_gdn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]  # boxes between :::, definitions after a colon, $ x $
myst_heading_anchors = 3  # a link may name a heading: page.md#heading

default_role = "py:obj"  # docstrings quote names in single backticks, which become links if the name is documented
autodoc_typehints = "none"  # docstrings state types; overloads would replace the signature
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Returns", "params_style")]  # results have names like arguments

mathjax_path = "https://cdn.jsdelivr.net/npm/mathjax@3.2.2/es5/tex-svg.js"
mathjax_options = {
    "integrity": "sha384-KKWa9jJ1MZvssLeOoXG6FiOAZfAgmzsIIfw8BXwI9+kYm0lPCbC6yTQPBC00F1/L",
    "crossorigin": "anonymous",
    "async": "async",
}

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_title = f"torch_gdn {release}"
html_show_sourcelink = False
html_copy_source = False
