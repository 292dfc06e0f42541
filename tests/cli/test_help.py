"""`--model.help CLASS` explains every option of every public class."""

from importlib import import_module

import pytest
from jsonargparse import SUPPRESS, ArgumentParser

PUBLIC = [(p, name) for p in ("lightning_modules", "datamodules", "callbacks") for name in import_module(p).__all__]


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=lambda x: x)
def test_every_option_has_its_text(package, name):
    cls = getattr(import_module(package), name)
    parser = ArgumentParser(exit_on_error=False)
    options = parser.add_class_arguments(cls, "it", skip={"parser", "config"})  # those of RunFolder come from the CLI
    actions = {action.dest: action for action in parser._actions}
    silent = [o for o in options if not actions[o].help or actions[o].help == SUPPRESS]
    assert not silent, f"{package}.{name} does not explain {', '.join(silent)}"
