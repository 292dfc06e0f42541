"""The shipped configurations: find one by its name, list them all."""

import sys
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent
OVERLAYS = ("strategy", "logger", "trainer")


def names() -> list[str]:
    """Names of all shipped configs, such as `ann_snn/digits`; the overlays come last."""
    found = [p.relative_to(ROOT).with_suffix("").as_posix() for p in ROOT.glob("*/*.yaml")]
    return sorted((n for n in found if not n.endswith("/sweep")), key=lambda n: (n.split("/")[0] in OVERLAYS, n))


def find(name: str) -> Path:
    """The file that `name` means: a path, or the name of a shipped config (also with `configs/` or `.yaml`).

    Raises:
        FileNotFoundError: naming the nearest names.
    """
    if Path(name).is_file():
        return Path(name)
    short = name.removeprefix("./").removeprefix("configs/").removesuffix(".yaml")
    if short in names():
        return ROOT / f"{short}.yaml"
    near = get_close_matches(short, names(), n=3, cutoff=0.4)
    near += [n for n in names() if n.split("/")[-1] == short.split("/")[-1] and n not in near]
    hint = f"did you mean {' or '.join(near)}?" if near else "`fulgurite configs` lists them"
    raise FileNotFoundError(f"no config file and no shipped config is called {name!r}: {hint}")


def checked(path: Path) -> Path:
    """The path, if the file is YAML.

    Raises:
        ValueError: naming the file and the place in it.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} has no sections such as model, data and trainer")
    return path


def description(name: str) -> str:
    """The one-line comment at the top of a shipped config."""
    with (ROOT / f"{name}.yaml").open() as file:
        return file.readline().lstrip("# ").strip()


def title(group: str) -> str:
    """What a folder of configs is about: the heading of the method's card, or what overlays are for."""
    if group in OVERLAYS:
        return "overlays, for a second -c"
    with (ROOT.parent / "lightning_modules" / group / "README.md").open() as file:
        return file.readline().lstrip("# ").strip()


def main(args: list[str]) -> None:
    """`fulgurite configs [TEXT]`: the shipped configs by method, or those whose name holds TEXT."""
    if args and args[0].startswith("-"):
        sys.stdout.write("usage: fulgurite configs [TEXT]: every shipped config, or those whose name holds TEXT\n")
        return
    shown = [n for n in names() if all(a in n for a in args)]
    if not shown:
        raise ValueError(f"no shipped config has {' and '.join(args)} in its name: `fulgurite configs` lists them all")
    width = max(map(len, shown), default=0)
    for group, members in groupby(shown, lambda name: name.split("/")[0]):
        sys.stdout.write(f"{group}: {title(group)}\n")
        sys.stdout.writelines(f"  {name:{width}}  {description(name)}\n" for name in members)
