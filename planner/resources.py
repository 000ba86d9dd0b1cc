"""Where the hardware data lies: `profiles/` of a checkout, or the copy that an installed wheel carries."""

from pathlib import Path

from planner.errors import PlannerError


def profiles_path() -> Path:
    """The directory with `devices/ links/ clusters/ measured/`.

    Raises:
        PlannerError: the installation has lost its data.
    """
    package = Path(__file__).resolve().parent
    for directory in (package / "_profiles", package.parent / "profiles"):
        if directory.is_dir():
            return directory
    raise PlannerError(f"the hardware data is missing beside {package}; install torch-autoplan again")
