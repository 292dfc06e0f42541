"""The documentation's pages, as far as they can be looked at without building them."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pages():
    """docs/pages.py, with a stand-in for MkDocs where that is not installed."""
    stand_in = types.ModuleType("mkdocs.structure.files")
    stand_in.File = stand_in.Files = object
    missing = [n for n in ("mkdocs", "mkdocs.structure", "mkdocs.structure.files") if n not in sys.modules]
    sys.modules.update(dict.fromkeys(missing, stand_in))
    try:
        spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "pages.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name in missing:
            del sys.modules[name]
    return module


def test_every_card_and_every_module_has_a_page(pages):
    rooms = {p.parent.name for p in ROOT.glob("lightning_modules/*/__init__.py")}
    assert {page for page in pages.PAGES.values() if page.startswith("methods/")} == {f"methods/{r}.md" for r in rooms}
    text = "".join(pages.reference().values())
    for package in ("lightning_modules", "datamodules", "callbacks"):
        for file in (ROOT / package).rglob("*.py"):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            assert f"::: {name}\n" in text or file.name.startswith("_"), name


@pytest.mark.parametrize(
    ("source", "page", "text", "expected"),
    [
        ("README.md", "index.md", "[a](lightning_modules/most/README.md#x)", "[a](methods/most.md#x)"),
        ("README.md", "index.md", "![a](docs/images/a.png)", "![a](images/a.png)"),
        ("README.md", "index.md", "[CITATION.cff](CITATION.cff)", "CITATION.cff"),
        ("lightning_modules/most/README.md", "methods/most.md", "[r](../../README.md)", "[r](../index.md)"),
        ("README.md", "index.md", "[a](https://b.org) [c](#d)", "[a](https://b.org) [c](#d)"),
    ],
)
def test_links_lead_from_page_to_page(pages, source, page, text, expected):
    assert pages.linked(text, source, page) == expected
