"""`autoplan`, which is `python -m planner`."""

import sys

INTERRUPTED = 130


def main() -> int:
    """Run the command line; Ctrl-C is answered while torch is still being imported, too."""
    try:
        from planner.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
