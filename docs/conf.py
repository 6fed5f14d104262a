"""The site of docs/, made by `make docs`: Sphinx with the theme Furo, pages in Markdown."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

project = "Octet"
author = "the authors of Octet"
version = release = (
    (ROOT / "loader.py").read_text().partition('__version__ = "')[2].partition('"')[0]
)

extensions = ["myst_parser", "site_extension"]
source_suffix = {".md": "markdown"}
nitpicky = True

myst_enable_extensions = ["dollarmath", "deflist", "attrs_block"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

html_theme = "furo"
html_title = "Octet"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_math_renderer = "mathml"
html_domain_indices = False
html_permalinks_icon = "#"
pygments_style = "friendly"
