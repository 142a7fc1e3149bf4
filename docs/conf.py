"""Settings of the documentation site: `make docs` builds it into build/site."""

import os
import re
import shutil
from importlib.metadata import version as installed_version
from pathlib import Path

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

os.environ["OTAD_PROGRESS"] = "0"  # the gallery shows output, not progress bars
os.environ.pop("OTAD_DATA", None)  # examples use data that come with the package

project = "otad"
author = "The otad authors"
copyright = f"2026, {author}"
version = release = installed_version("otad")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["auto_examples/*.ipynb", "auto_examples/*.py"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other libraries in signatures
default_role = "code"  # single backticks in docstrings are code

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
napoleon_custom_sections = [(name, "params_style") for name in ("Attributes", "Parameters")]
napoleon_use_rtype = False  # the type and the meaning of what is returned in one line
python_maximum_signature_line_length = 88
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = True
add_module_names = False

# Examples write files beside themselves, so the gallery runs a copy of them.
ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "examples"
shutil.rmtree(COPY, ignore_errors=True)
COPY.mkdir(parents=True)
for file in [*(ROOT / "examples").glob("plot_*.py"), ROOT / "examples" / "README.rst"]:
    shutil.copy(file, COPY)

sphinx_gallery_conf = {
    "examples_dirs": str(COPY),
    "gallery_dirs": "auto_examples",
    "filename_pattern": r"plot_",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "min_reported_time": 60,
    "show_memory": False,
    "show_signature": False,
    "remove_config_comments": True,
    "image_scrapers": ("matplotlib",),
    "reset_modules": ("matplotlib",),
}

html_theme = "furo"
html_math_renderer = "mathml"
html_title = "otad"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

linkcheck_timeout = 20
linkcheck_workers = 4


# Pages link to files of the repository, which works where the repository is browsed. On the site
# the scripts of the gallery and the pages of the root have pages of their own.
SITE_LINKS = {
    r"examples/(plot_\w+)\.py": r"/auto_examples/\1.rst",
    r"examples/?": "/auto_examples/index.rst",
    r"README\.md": "/index.md",
    r"CONTRIBUTING\.md": "/contributing.md",
    r"CHANGELOG\.md": "/changelog.md",
    r"SECURITY\.md": "/security.md",
}


def _link_within_site(app, page, source):
    for file, target in SITE_LINKS.items():
        source[0] = re.sub(rf"\]\((?:\.\./)+{file}(?=[)#])", f"]({target}", source[0])


def _escape_marks(app, what, name, obj, options, lines):
    """In docstrings only backticks are markup: (n, *input_shape) and |x| are text."""
    for number, line in enumerate(lines):
        parts = line.split("`")
        parts[::2] = [re.sub(r"(?<![\w*])\*(?=\w)|\|", r"\\\g<0>", part) for part in parts[::2]]
        if not line.lstrip().startswith((">>>", "...")):
            lines[number] = "`".join(parts)


def _skip_fields(app, what, name, obj, skip, options):
    """Docstrings describe the fields of a named tuple; its own only number them."""
    return (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") or None


def _show_factories(app, what, name, obj, options, signature, returned):
    """Fields whose default is made by a function have a default that Sphinx can read."""
    return signature and signature.replace("<factory>", "..."), returned


def _show_math(writer, node):
    """Formulas are MathML, which browsers show without a script from elsewhere."""
    display = "block" if node.tagname == "math_block" else "inline"
    formula = convert(node.astext(), display=display)
    bar = 'stretchy="false">&#x0007C;'  # of a norm: without the space around an operator
    writer.body.append(formula.replace(bar, f'lspace="0" rspace="0" {bar}'))
    raise SkipNode


def setup(app):
    app.connect("source-read", _link_within_site)
    app.connect("autodoc-process-docstring", _escape_marks, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("autodoc-process-signature", _show_factories)
    app.add_html_math_renderer("mathml", (_show_math, None), (_show_math, None))
