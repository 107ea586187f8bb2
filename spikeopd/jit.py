"""Where numba keeps what it compiled. Standard library, and numba when it is asked for."""

from __future__ import annotations

from functools import cache
from typing import Any

from spikeopd.errors import say


def can_cache(source: str) -> bool:
    """Whether numba may keep the compiled functions of this source file: `njit(cache=can_cache(__file__))`.

    Asked with `cache=True`, numba raises at import where it can write neither beside the source nor below HOME nor to
    NUMBA_CACHE_DIR (a read-only image, a user without a home). Such a machine compiles anew at each start.
    """
    import numba

    scope: dict[str, Any] = {}
    exec(compile("def probe():\n    pass\n", source, "exec"), scope)  # a function of that file, for numba's own rules
    try:
        numba.njit(cache=True)(scope["probe"])
    except RuntimeError:
        _say_once()
        return False
    return True


@cache
def _say_once() -> None:
    say(
        "numba: no place to keep compiled code, it is compiled anew at each start; set NUMBA_CACHE_DIR to a folder "
        "that can be written"
    )
