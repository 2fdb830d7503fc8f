"""Sphinx with MyST: pages in Markdown, the API reference from the docstrings. `make docs` builds, warnings are errors.

Nothing here needs a network: formulas are text, and only links within the tree are checked, by the build itself.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, also where torch_gdn is not installed

import torch_gdn

project = "torch_gdn"
author = "the torch_gdn contributors"
project_copyright = author
version = release = torch_gdn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]  # boxes between :::, definitions behind a colon
myst_heading_anchors = 3  # a link may name a heading: page.md#heading

default_role = "py:obj"  # docstrings quote names in single backticks: a link where the name is documented
autodoc_typehints = "none"  # docstrings say them; overloads would replace the signature
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Returns", "params_style")]  # results have names, as arguments do

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_title = f"torch_gdn {release}"
html_show_sourcelink = False
html_copy_source = False
