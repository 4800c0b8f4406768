"""Configuration of the documentation site: `make docs`."""

import re
from importlib import import_module
from importlib.metadata import version as installed_version
from pathlib import Path
from shutil import copytree
from typing import Any

import click
from sphinx.ext.autodoc import mock

from ragorder.cli import main

# What the reference's modules import, and requirements/docs.txt does not install. Sphinx stands in for them, also where
# they are installed: a site is the same everywhere.
autodoc_mock_imports = [
    *("dspy", "httpx2", "huggingface_hub", "llama_index", "msgspec", "numpy", "openai", "psutil"),
    *("prometheus_client", "safetensors", "starlette", "tokenizers", "torch", "transformers", "xxhash"),
]

# Sphinx runs imports as a type checker would, which pydantic's models do not survive: all is imported before it starts.
# LangChain's base classes are such models, and Haystack's decorator wraps methods: neither survives stand-ins.
for name in ("ragorder.adapters.langchain", "ragorder.adapters.haystack"):
    import_module(name)
with mock(autodoc_mock_imports):
    for name in main.list_commands(click.Context(main)):
        main.get_command(click.Context(main), name)
    for name in re.findall(
        r"automodule:: (\S+)", Path(__file__).with_name("reference").joinpath("api.md").read_text("utf-8")
    ):
        import_module(name)

project = "ragorder"
author = "The ragorder authors"
project_copyright = "The ragorder authors, Apache-2.0"
release = version = installed_version("ragorder")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_click"]

# With the outputs that they are committed with. A page can only be below the folder of the site's sources.
nb_execution_mode = "off"
copytree(Path(__file__).parents[1] / "notebooks", Path(__file__).with_name("notebooks"), dirs_exist_ok=True)
exclude_patterns = ["_build"]
# Examples in the pages have an ellipsis where your code stands, which is no Python. Links out of docs/ are checked by
# tests/project/test_docs.py.
suppress_warnings = ["misc.highlighting_failure", "myst.xref_missing"]

html_theme = "furo"
html_title = f"ragorder {release}"
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Options begin with two hyphens, also in the text of a page.
smartquotes = False

# Docstrings are plain text with names in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False


def read_docstring(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make indented blocks literal, as they are code or drawings, and plurals of names (`Document`s) valid."""
    lines[:] = [
        re.sub(r"(`[^`]+`)(\w?)", lambda name: name[1] + r"\ " * bool(name[2]) + name[2], line) for line in lines
    ]
    for at in range(len(lines) - 1, 0, -1):
        begins = lines[at].startswith("    ") and not lines[at - 1].strip()
        above = next((line for line in reversed(lines[:at]) if line.strip()), "")
        if begins and not above.startswith((" ", "- ")) and not above.endswith("::"):
            lines[at:at] = ["::", ""]


def read_help(app: object, command: object, lines: list[str]) -> None:
    """Help is plain text: a name that ends in an underscore is no link."""
    lines[:] = [re.sub(r"_(?!\w)", r"\\_", line) for line in lines]


def setup(app: Any) -> None:
    app.connect("sphinx-click-process-description", read_help)
    app.connect("autodoc-process-docstring", read_docstring)
