"""mlx-lm with turbomoq: prompt caches that are packed while a model decodes, and parked in a server between turns.

    from turbomoq_mlx import install, make_turbomoq_cache

    install()                                         # models attend on the packed form
    cache = make_turbomoq_cache(model, "best@3")      # any recipe of the command line
    generate(model, tokenizer, prompt, prompt_cache=cache)

    from turbomoq_mlx import Pool

    pool = Pool()                                     # the server of `turbomoq serve --budget 8GiB`
    with pool.session("agent-1", model) as cache:     # what the agent had, or a new cache
        generate(model, tokenizer, prompt, prompt_cache=cache)
"""

from . import release  # refuses other releases of mlx-lm before anything of them is used
from .cache import TurboMoqCache
from .convert import convert, make_turbomoq_cache
from .files import load_prompt_cache
from .library import LibraryNotFound, Unsupported
from .patch import install, uninstall
from .recipe_cache import BatchRecipeCache, RecipeCache
from .pool import Parked, Pool, PoolError, default_folder

__all__ = [
    "BatchRecipeCache",
    "LibraryNotFound",
    "Parked",
    "Pool",
    "PoolError",
    "RecipeCache",
    "TurboMoqCache",
    "Unsupported",
    "convert",
    "default_folder",
    "install",
    "load_prompt_cache",
    "make_turbomoq_cache",
    "uninstall",
]
