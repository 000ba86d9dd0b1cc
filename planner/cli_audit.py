"""The command `autoplan audit`: a run beside its plan, and what it teaches a profile."""

import argparse
from pathlib import Path

from planner.audit import Audit, RunRecord, audit, run_row
from planner.errors import ProfileError
from planner.plan import Plan
from planner.profile import Profile


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
    command.add_argument("plan", metavar="PLAN", nargs="?", help="the plan file of the run (default: the record's own)")
    command.add_argument("record", metavar="RUN", help="a file that autoplan run --record or trainer.record wrote")
    command.add_argument(
        "--update-profile",
        metavar="FILE",
        help="add what was measured to this profile, new or not: plan --profile FILE then corrects its terms by it",
    )
    command.add_argument("--any-machine", action="store_true", help="add to a profile of another machine or torch")


def audit_run(arguments: argparse.Namespace) -> tuple[Audit, str]:
    """The comparison, and what was done to a profile in words.

    Raises:
        PlannerError: a file is broken, or the plan, the run and the profile do not belong together.
    """
    plan = Plan.load(arguments.plan) if arguments.plan else None
    record = RunRecord.load(arguments.record)
    found = audit(record, plan)
    if not arguments.update_profile:
        return found, ""
    row = run_row(record)
    if record.machine is None:
        raise ProfileError("the record does not say on which machine it was measured, so no profile can take it")
    path = Path(arguments.update_profile)
    profile = Profile.load(path) if path.exists() else Profile(machine=record.machine)
    if (differences := profile.machine.differences(record.machine)) and not arguments.any_machine:
        raise ProfileError(
            f"{path} is of {' and '.join(differences)} than the run; give another file, or say --any-machine"
        )
    profile.with_rows([row]).save(path)
    return found, f"kept in {path}; autoplan plan MODEL --profile {path} corrects its terms by it"
