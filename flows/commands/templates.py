"""Write a new world, method, recipe, or skill for coding agents from shipped templates."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from agentr_core.environments import registry
from agentr_core.errors import ConfigError, UserError
from agentr_core.methods import table
from agentr_core.recipes.parsing import yaml_quoted
from agentr_core.system import data_path, new_folder, shipped_models, write_text
from agentr_core.texts import did_you_mean

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_MODEL = "data/models/textcraft-tiny"
"""The model in templates: relative to a checkout, in which they are tested."""
_WORLD = "{name: textcraft}"
_RECIPE = "my-recipe"


def new_world(name: str) -> Path:
    """Write a package with a world and its test, and return its new folder. Raises `ConfigError`
    for a name that cannot be one or is taken, and `DiskError`.
    """
    return _package("world", "combination-lock", name, registry.names())


def new_method(name: str) -> Path:
    """Write a package with a method and a recipe for it; return and raise as `new_world` does."""
    return _package("method", "reply-recital", name, table.method_names())


def new_recipe(name: str, *, world: str, method: str) -> Path:
    """Write a recipe that `agentr plan` accepts, and return its new file.

    Raises `ConfigError` for a name that cannot be one, an existing file, an unknown world or
    method, or one that needs more than a template has; and `DiskError`.
    """
    file = Path(f"{name}.yaml")
    _check_name(name, "recipe")
    if file.exists() or file.is_symlink():
        raise ConfigError(f"{file} already exists; choose another name")
    if world not in (worlds := registry.names()):
        raise ConfigError(
            f"there is no environment {world!r}{did_you_mean(world, worlds)}; installed are {', '.join(worlds)}"
        )
    table.method_named(method)
    templates = {path.stem: path for path in data_path("templates", "recipe").glob("*.yaml")}
    if method not in templates:
        raise ConfigError(
            f"there is no template for method {method}, only for {', '.join(sorted(templates))}; copy a recipe that "
            "names it (`agentr recipes`)"
        )
    text = _filled(
        templates[method].read_text(encoding="utf-8"),
        {_RECIPE: name, _WORLD: f"{{name: {world}}}", _MODEL: _model_for(world)},
    )
    _check_plan(text, world, method)
    write_text(file, text)
    return file


def new_skill(folder: Path) -> Path:
    """Write the skill that tells coding agents how to use this program, and return its new folder.
    Raises `ConfigError` if there is one already, and `DiskError`.
    """
    with new_folder(folder / "agentr") as draft:
        for file in data_path("skills", "agentr").iterdir():
            (draft / file.name).write_bytes(file.read_bytes())
    return folder / "agentr"


def _package(kind: str, template_name: str, name: str, used_names: Collection[str]) -> Path:
    """Write the package template of a kind, with `name` in place of the template's own name."""
    _check_name(name, kind)
    if Path(name).exists():
        raise ConfigError(f"{name} already exists; choose another name")
    if name in used_names:
        raise ConfigError(f"there is a {kind} {name} already; choose another name")
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or find_spec(module) is not None:
        raise ConfigError(f"its module would be {module}, which Python has already; choose another name")
    texts = {
        file.name: file.read_text(encoding="utf-8") for file in data_path("templates", kind).iterdir() if file.is_file()
    }
    forms = dict(zip(_forms(template_name), _forms(name), strict=True))
    class_name = _forms(name)[2]
    if any(re.search(rf"^(from|import) .*\b{class_name}\b", text, re.M) for text in texts.values()):
        raise ConfigError(f"its class would be {class_name}, which a {kind} uses; choose another name")
    forms[_MODEL] = _model_for("textcraft")
    # The template's build backend is setuptools, which is installed with torch, so that
    # `pip install --no-build-isolation` downloads nothing. With `package-dir`, an editable install
    # adds a path: an import hook would come too late, since from the parent folder the project's
    # folder already looks like a package of the same name. Recipes name worlds by entry points and
    # not by files, whose names would be part of the ids of instances.
    with new_folder(Path(name)) as draft:
        for file, text in texts.items():
            (draft / _filled(file, forms)).write_text(_filled(text, forms), encoding="utf-8")
    return Path(name)


def _check_name(name: str, kind: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a {kind}; take letters from a to z and digits, with dashes between words, such as "
            f"my-{kind}"
        )


def _forms(name: str) -> tuple[str, str, str, str]:
    """Return a name as it is written in recipes, as a module, as a class and in a title."""
    words = name.split("-")
    return name, "_".join(words), "".join(word.capitalize() for word in words), " ".join(words).capitalize()


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub("|".join(map(re.escape, values)), lambda match: values[match[0]], text)


def _model_for(world: str) -> str:
    """Return the directory of the shipped model for a world, else of that for TextCraft, quoted for
    a recipe.
    """
    models = shipped_models()
    return yaml_quoted(str(models.get(f"{world}-tiny", models["textcraft-tiny"])))


def _check_plan(text: str, world: str, method: str) -> None:
    """Raise `ConfigError` if `agentr plan` refuses the text of a recipe."""
    from flows.commands.plan import describe

    with TemporaryDirectory(prefix="agentr-recipe-") as folder:
        draft = Path(folder, "recipe.yaml")
        draft.write_text(text, encoding="utf-8")
        try:
            describe(draft, [])
        except UserError as error:
            raise ConfigError(
                f"world {world} and method {method} need more than a template has: {error}; begin with a recipe for "
                "them (`agentr recipes`)"
            ) from error
