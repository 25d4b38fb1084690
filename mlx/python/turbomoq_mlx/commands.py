"""mlx-lm's own commands on packed caches.

    python -m turbomoq_mlx.server --model MODEL --kv best@3 [any option of mlx_lm.server]
    python -m turbomoq_mlx.generate --model MODEL --kv best@3 --prompt TEXT

and likewise chat and cache_prompt. The command is mlx-lm's: only the caches that it makes for a model are ours, so that requests are
batched, and prompts found again in its own store, as with float caches. `--kv-settings FILE` has a recipe for each model:

    kv = "best@3"                        # for every model without a section
    [models."*Qwen3-4B*"]                # the name that was given to load it; the first section that fits counts
    kv = "best@3/2,window=256"
    exempt = [0, 1]
    exact-last = true
    [models."*draft*"]
    kv = "float"                         # mlx-lm's own cache
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import runpy
import sys
from typing import Any, Optional

from mlx_lm import utils
from mlx_lm.models import cache as mlx_cache

from .convert import make_turbomoq_cache
from .library import Unsupported
from .patch import install, replace

FLOAT = "float"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The cache of a model."""

    kv: str = FLOAT
    """A recipe, or `float` for mlx-lm's own cache."""
    exempt: tuple[int, ...] = ()
    exact_last: bool = False

    @classmethod
    def read(cls, where: str, table: dict[str, Any]) -> "Choice":
        """A section of the settings. `Unsupported` names what is unknown or of another type."""
        kinds = {"kv": str, "exempt": list, "exact-last": bool}
        for name, value in table.items():
            if not isinstance(value, kinds.get(name, ())):
                known = ", ".join(kinds)
                raise Unsupported(f"{where}: {name} = {value!r}: known are {known}")
        if not all(type(n) is int for n in table.get("exempt", [])):
            raise Unsupported(f"{where}: exempt = {table['exempt']!r}: ordinals of layers are needed")
        return cls(table.get("kv", FLOAT), tuple(table.get("exempt", ())), table.get("exact-last", False))

    def make(self, model: Any, max_kv_size: Optional[int]) -> list[Any]:
        """The caches of a model's layers."""
        return make_turbomoq_cache(model, self.kv, max_kv_size=max_kv_size, exempt=self.exempt, exact_last=self.exact_last)


class Settings:
    """Which cache each model gets."""

    def __init__(self, default: Choice, models: Optional[dict[str, Choice]] = None):
        self.default, self.models = default, models or {}

    @classmethod
    def load(cls, path: str, default: Optional[Choice] = None) -> "Settings":
        """Settings from a TOML file; `default` counts for models without a section if it is given."""
        try:
            import tomllib
        except ImportError as error:
            raise Unsupported("--kv-settings needs Python 3.11 or later, which reads TOML") from error
        with open(path, "rb") as file:
            try:
                table = tomllib.load(file)
            except tomllib.TOMLDecodeError as error:
                raise Unsupported(f"{path}: {error}") from error
        models = table.pop("models", {})
        if not all(isinstance(section, dict) for section in models.values()):
            raise Unsupported(f"{path}: models: a section for each, such as [models.\"*Qwen3*\"]")
        sections = {name: Choice.read(f"{path}: models.{name}", section) for name, section in models.items()}
        return cls(default or Choice.read(path, table), sections)

    def of(self, name: str) -> Choice:
        """The choice for a model by the name it was loaded by."""
        return next((choice for pattern, choice in self.models.items() if fnmatch.fnmatchcase(name, pattern)), self.default)


def use(settings: Settings) -> None:
    """Lets everything of mlx-lm that makes a cache for a model make the chosen one, and models attend on the packed form."""
    install()
    stock_make, stock_load = mlx_cache.make_prompt_cache, utils.load

    @functools.wraps(stock_make)
    def make_prompt_cache(model: Any, max_kv_size: Optional[int] = None) -> list[Any]:
        choice = settings.of(getattr(model, "turbomoq_name", ""))
        return stock_make(model, max_kv_size) if choice.kv == FLOAT else choice.make(model, max_kv_size)

    @functools.wraps(stock_load)
    def load(path_or_hf_repo: str, *more: Any, **options: Any) -> Any:
        loaded = stock_load(path_or_hf_repo, *more, **options)
        object.__setattr__(loaded[0], "turbomoq_name", str(path_or_hf_repo))
        return loaded

    replace("make_prompt_cache", stock_make, make_prompt_cache)
    replace("load", stock_load, load)


def main(command: str, arguments: Optional[list[str]] = None) -> None:
    """Runs a command of mlx-lm; `arguments` are those of this process by default."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(f"python -m turbomoq_mlx.{command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--kv", metavar="RECIPE", help="pack the cache by a recipe such as best@3 or turbomoq@4/2,window=64")
    parser.add_argument("--kv-exempt", metavar="N,N", help="layers that stay float, from 0, such as 0,1")
    parser.add_argument("--kv-exact-last", action="store_true", help="leave the last layer float")
    parser.add_argument("--kv-settings", metavar="FILE", help="recipes by model, in TOML: see turbomoq_mlx.commands")
    ours, rest = parser.parse_known_args(arguments)
    if "-h" in rest or "--help" in rest:
        print(parser.format_help())
    try:
        use(_settings(ours))
    except (Unsupported, OSError) as error:
        parser.error(str(error))
    sys.argv = [f"mlx_lm.{command}", *rest]
    runpy.run_module(f"mlx_lm.{command}", run_name="__main__", alter_sys=True)


def _settings(ours: argparse.Namespace) -> Settings:
    try:
        exempt = tuple(int(n) for n in ours.kv_exempt.split(",")) if ours.kv_exempt else ()
    except ValueError as error:
        raise Unsupported(f"--kv-exempt {ours.kv_exempt}: numbers of layers such as 0,1 are needed") from error
    given = Choice(ours.kv, exempt, ours.kv_exact_last) if ours.kv else None
    if given is None and (exempt or ours.kv_exact_last):
        raise Unsupported("--kv-exempt and --kv-exact-last go with --kv RECIPE")
    return Settings.load(ours.kv_settings, given) if ours.kv_settings else Settings(given or Choice())
