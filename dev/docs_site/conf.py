"""The configuration of Sphinx for the documentation site. `dev/scripts/docs_site.py` prepares and builds the pages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from project_version import project_version

project = "Tinsmith"
author = "Tinsmith contributors"
project_copyright = "Tinsmith contributors"
release = version = project_version()

extensions = ["myst_nb", "sphinx.ext.autodoc"]
root_doc = "index"
# Quotation marks and dashes stay as the pages have them.
smartquotes = False

myst_heading_anchors = 4  # as on GitHub: pages link to headings by these anchors
myst_enable_extensions = ["attrs_inline"]
# The notebooks contain their outputs. A test runs them.
nb_execution_mode = "off"
nb_render_markdown_format = "commonmark"

# Docstrings are plain text, in which a single pair of backticks marks code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}

html_theme = "furo"
html_title = f"Tinsmith {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": [], "source_view_link": "", "navigation_with_keys": True}
