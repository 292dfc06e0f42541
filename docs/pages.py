"""Makes the documentation's pages when MkDocs builds them: README and cards as they are, docstrings by mkdocstrings."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "THIRD_PARTY.md": "third_party.md"}
PAGES |= {
    card.relative_to(ROOT).as_posix(): f"methods/{card.parent.name}.md"
    for card in sorted(ROOT.glob("lightning_modules/*/README.md"))
}
PACKAGES = ("lightning_modules", "datamodules", "callbacks")


def linked(text: str, source: str, page: str) -> str:
    """Links between files of the repository become links between pages; a file without a page loses its link."""
    up = "../" * page.count("/")

    def replace(match: re.Match) -> str:
        picture, label, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or ":" in path:
            return match[0]
        file = (ROOT / source).parent.joinpath(path).resolve().relative_to(ROOT).as_posix()
        if file in PAGES:
            return f"{picture}[{label}]({up}{PAGES[file]}{'#' + anchor if anchor else ''})"
        if file.startswith("docs/"):
            return f"{picture}[{label}]({up}{file.removeprefix('docs/')})"
        return label

    return re.sub(r"(!?)\[([^\]\n]+)\]\(([^)\s]+)\)", replace, text)


def reference() -> dict[str, str]:
    """A page of docstrings for each folder of code: its modules, in alphabetical order."""
    pages: dict[str, list[str]] = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            if parts[-1].startswith("_"):
                continue
            room = parts[1] if len(parts) > 2 else package
            pages.setdefault(room, []).append(".".join(parts))
    return {
        f"reference/{room}.md": f"# {room}\n\n" + "\n\n".join(f"::: {module}" for module in modules) + "\n"
        for room, modules in pages.items()
    }


def on_files(files: Files, config: Any) -> Files:
    """Add the pages (an event of MkDocs)."""
    made = {page: linked((ROOT / source).read_text(), source, page) for source, page in PAGES.items()} | reference()
    for page, content in made.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_config(config: Any) -> Any:
    """Write out the pages of the menu's folders (an event of MkDocs)."""
    made = [*PAGES.values(), *reference()]
    for entry in config.nav:
        for title, folder in entry.items() if isinstance(entry, dict) else ():
            entry[title] = [page for page in made if page.startswith(folder)]
    return config
