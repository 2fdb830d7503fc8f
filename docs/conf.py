"""Configures Sphinx with MyST: pages in Markdown, the API reference from the docstrings. `make docs` fails on warnings.

Nothing here needs a network: formulas are text, and the build itself checks links within the tree only.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, even if torch_gdn is not installed

import torch_gdn

project = "torch_gdn"
author = "the torch_gdn contributors"
project_copyright = author
version = release = torch_gdn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]  # boxes between :::, definitions after a colon
myst_heading_anchors = 3  # a link may name a heading: page.md#heading

default_role = "py:obj"  # docstrings quote names in single backticks, which become links if the name is documented
autodoc_typehints = "none"  # docstrings state types; overloads would replace the signature
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Returns", "params_style")]  # results have names like arguments

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_title = f"torch_gdn {release}"
html_show_sourcelink = False
html_copy_source = False
