"""Pages that are made when the site is built: the methods, the recipe, the command line, Python, the presets, the tutorial."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import cli_page
import method_pages
import notebook_page
import preset_page
import python_page
import recipe_page
from mkdocs.structure.files import File, Files


def on_config(config: Any) -> Any:
    """Add the methods' pages to the navigation."""
    (methods,) = (entry["Methods"] for entry in config.nav if "Methods" in entry)
    methods.extend({title: name} for name, (title, _) in method_pages.pages().items())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    made = {name: text for name, (_, text) in method_pages.pages().items()}
    made["reference/recipe.md"] = recipe_page.page()
    made["reference/cli.md"] = cli_page.page()
    made["reference/python.md"] = python_page.page()
    made["reference/presets.md"] = preset_page.page()
    made["tutorial.md"] = notebook_page.page(Path(config.docs_dir) / "tutorial.ipynb")
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files
