"""The tables under `profiles/published/`: what published rows leave out about their models, sources and hardware."""

import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Any

from planner.resources import profiles_path


@cache
def table(name: str) -> Mapping[str, Any]:
    """One of the files, as it is written."""
    return tomllib.loads((profiles_path() / "published" / f"{name}.toml").read_text(encoding="utf-8"))
