"""The command line: parse, call one function, print one thing, exit.

Exit codes: 0 done, 1 a PlannerError (one line on stderr), 2 usage, 130 Ctrl-C, 143 SIGTERM.
"""

import argparse
import contextlib
import difflib
import json
import logging
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from planner import cli_audit, cli_measure, report
from planner.audit import audit
from planner.cluster import Cluster, all_devices, all_presets
from planner.engine import STOCK, engine_named
from planner.errors import ModelError, PlanError, PlannerError, RunError
from planner.plan import OPTIMIZERS, PRECISIONS, Plan, write_atomically
from planner.profile import Profile, measured_cluster
from planner.report.accuracy import accuracy_html, accuracy_table
from planner.report.auditing import audit_table
from planner.report.tracing import trace_data, trace_text
from planner.runtime.launch import RankError, Terminated, Training, launch
from planner.runtime.machine import this_machine
from planner.runtime.phases import WARM_UP_STEPS
from planner.runtime.weights import check_weights
from planner.runtime.worker import RANDOM_DATA, Job, device_kind, memory_kind, num_local_devices
from planner.search import OBJECTIVES, SAMPLES_PER_DEVICE, Pins, Search, cluster_named, search_model
from planner.search.measuring import Measuring, local_measuring
from planner.trace import trace
from planner.validate import explain, validate
from planner.zoo.load import LoadedModel, load_function, load_model
from planner.zoo.registry import NAMES, build, describe

DEFAULT_MODEL = "gpt-tiny"
DEFAULT_TOP = 5
DEFAULT_RUN_BATCH = 16
DEFAULT_STEPS = 100
DEFAULT_LEARNING_RATE = 1e-3
DEFAULT_OPTIMIZER = "adamw"
DEFAULT_OBJECTIVE = "time"
PIPE_COLUMNS = 160  # a pipe has no width; do not fold tables
LARGEST_COUNT = 10**9
INTERRUPTED = 130
SIGNALLED = 128

OnProgress = Callable[[str, int, int], None]  # what, done, of
OnStep = Callable[[int, float, float], None]  # step, loss, seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = parser().parse_args(argv)
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    with _quiet_libraries(verbose=arguments.verbose):
        try:
            arguments.run(arguments)
            sys.stdout.flush()
        except PlannerError as error:
            if isinstance(error, RankError) and error.details:
                errors.print(error.details.rstrip(), markup=False)
            errors.print(f"error: {one_line(error)}", markup=False)
            return 1
        except KeyboardInterrupt:
            errors.print("interrupted", markup=False)
            return INTERRUPTED
        except Terminated as ended:
            errors.print("ended by a signal", markup=False)
            return SIGNALLED + ended.number
        except BrokenPipeError:  # the reader of our output, such as head, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains as it exits
            return 1
        except SystemExit as error:
            errors.print(f"error: the model's code ends the program with exit code {error.code}", markup=False)
            return 1
        except Exception as error:
            if arguments.verbose:
                errors.print(traceback.format_exc().rstrip(), markup=False)
            place = traceback.extract_tb(error.__traceback__)[-1]
            errors.print(
                f"error: a fault in autoplan, please report it: {type(error).__name__}: {one_line(error)} "
                f"({place.filename}:{place.lineno}; --verbose shows the traceback)",
                markup=False,
            )
            return 1
    return 0


def one_line(error: BaseException) -> str:
    """The message without line breaks."""
    return " ".join(str(error).split())


@contextmanager
def _quiet_libraries(*, verbose: bool) -> Iterator[None]:
    """Warnings and logs of torch and others only with --verbose: stderr is for what the user has to know."""
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Joined(argparse.Action):
    """An option of several entries that may be given again: none of them is lost."""

    def __call__(self, _: object, namespace: argparse.Namespace, value: object, __: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, f"{before},{value}" if before else value)


class _Parser(argparse.ArgumentParser):
    """Wrong usage is one line too."""

    def error(self, message: str) -> NoReturn:
        """Print it and exit with code 2."""
        self.exit(2, f"error: {one_line(Exception(message))}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = _Parser(
        prog="autoplan",
        description="Plans the fastest distributed training that fits, and runs it on stock PyTorch.",
        epilog="autoplan run, with nothing else, plans a small GPT for this machine and trains it on real text.",
        allow_abbrev=False,
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    plan = _command(
        commands,
        "plan",
        _plan,
        "rank the ways to train a model on a cluster",
        "autoplan plan llama3-70b --cluster 8x8xH100-80GB --global-batch 512 --out plan.json",
    )
    plan.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    plan.add_argument("--cluster", default="local", metavar="C", help=f"{_CLUSTER_HELP} (default local)")
    _planning_options(plan, f"{SAMPLES_PER_DEVICE} per device of the cluster")
    plan.add_argument(
        "--top", type=_positive, default=DEFAULT_TOP, metavar="K", help=f"plans to print (default {DEFAULT_TOP})"
    )
    plan.add_argument("--out", metavar="FILE", help="write the best plan to this file")
    plan.add_argument(
        "--engine",
        default=STOCK,
        metavar="E",
        help=f"training system whose times count (default {STOCK}, which runs the plan): deepspeed, megatron or "
        "another of profiles/engines",
    )
    _profile_options(plan)

    traced = _command(
        commands,
        "trace",
        _trace,
        "what a model consists of, and what of it a plan has to mind",
        "autoplan trace llama3-8b --seq 4096",
    )
    traced.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    traced.add_argument("--seq", type=_positive, metavar="S", help=_SEQ_HELP)
    traced.add_argument("--precision", choices=PRECISIONS, help="default bf16, on a CPU fp32")
    traced.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="whose kernels are counted (default cuda)"
    )

    show = _command(commands, "show", _show, "print a plan file as text", "autoplan show plan.json")
    show.add_argument("plan", metavar="PLAN", help="a file that autoplan plan --out wrote")
    show.add_argument(
        "--sharding",
        action="store_true",
        help="how each block is split over the ranks of cp and tp, with its collectives",
    )

    diff = _command(commands, "diff", _diff, "what differs between two plan files", "autoplan diff one.json two.json")
    diff.add_argument("here", metavar="PLAN", help="a plan file")
    diff.add_argument("there", metavar="OTHER", help="another plan file")

    run = _command(
        commands,
        "run",
        _run,
        "train on this machine by the best plan, or by a given one",
        "autoplan run gpt-tiny --nproc 2 --fix pp=2 --steps 50",
    )
    run.add_argument("model", metavar="MODEL", nargs="?", help=f"{_MODEL_HELP} (default {DEFAULT_MODEL})")
    run.add_argument("--plan", metavar="FILE", help="train by this plan file; without it a plan is made")
    run.add_argument(
        "--cluster", default="local", metavar="C", help="local (default), or a file that describes this machine"
    )
    _planning_options(run, str(DEFAULT_RUN_BATCH))
    run.add_argument(
        "--steps", type=_positive, default=DEFAULT_STEPS, metavar="N", help=f"training steps (default {DEFAULT_STEPS})"
    )
    run.add_argument("--nproc", type=_positive, metavar="N", help="devices of local to plan for (default all)")
    _profile_options(run)
    run.add_argument(
        "--no-measure",
        action="store_true",
        help="plan by the rates of this machine alone, without timing the model's blocks (a CPU's, once)",
    )
    check = run.add_mutually_exclusive_group()
    check.add_argument(
        "--no-check",
        action="store_true",
        help="train without first comparing the plan's blocks with the model itself: loss and every gradient",
    )
    check.add_argument(
        "--check",
        choices=["refuse", "replicate"],
        default="refuse",
        help="what is done with an operator that tensor-parallel ranks compute otherwise than one device: refuse to "
        "train (default), or run it whole on every rank",
    )
    run.add_argument(
        "--weights",
        metavar="PATH",
        help="start from these weights: a directory or file of safetensors or torch.save (default: drawn by the seed)",
    )
    run.add_argument("--seed", type=_whole, default=0, metavar="S", help="of weights and data (default 0)")
    run.add_argument(
        "--lr",
        type=_positive_number,
        default=DEFAULT_LEARNING_RATE,
        metavar="R",
        help=f"learning rate (default {DEFAULT_LEARNING_RATE})",
    )
    run.add_argument(
        "--record",
        metavar="RUN",
        help="write to this file what the steps took, phase by phase and rank by rank; autoplan audit compares it",
    )
    run.add_argument(
        "--count-experts",
        metavar="FILE",
        help="write to this file how many tokens each expert got; --expert-loads plans by it",
    )
    run.add_argument(
        "--data",
        metavar="FILE:LOADER",
        help="loader(global_batch, seed) yields global batches (default: text for models that read bytes, "
        "else random values)",
    )

    measured = _command(
        commands,
        "measure",
        _measure,
        "time a model's operators, collectives and copies on this machine, into a profile to plan by",
        "autoplan measure gpt2 --micro-batch 1,4 --budget 60s --out profile.json",
    )
    cli_measure.add_options(measured, _MODEL_HELP, _SEQ_HELP, PRECISIONS)

    checked = _command(
        commands,
        "validate",
        _validate,
        "compare predictions with published measurements",
        "autoplan validate benchmarks/published/training.csv",
    )
    checked.add_argument("files", metavar="FILE.csv", nargs="+", help="rows as in benchmarks/published/training.csv")
    checked.add_argument(
        "--engine",
        metavar="NAME",
        help="engine of rows whose source (an id less its number) is not known (default megatron, with ZeRO-2/3 stock)",
    )
    checked.add_argument("--html", metavar="FILE", help="write a page with the table and every measured step")
    checked.add_argument("--explain", metavar="ID", help="only this row: the terms of its prediction, as JSON")

    audited = _command(
        commands,
        "audit",
        _audit,
        "compare what a run took with what its plan predicted, term by term",
        "autoplan audit plan.json run.json --update-profile profile.json",
    )
    cli_audit.add_options(audited)

    models = _command(commands, "models", _models, "list the models of the zoo", "autoplan models gpt2 llama3-8b")
    models.add_argument("names", metavar="NAME", nargs="*", help="only these")

    cluster = _command(
        commands,
        "cluster",
        _cluster,
        "print a cluster with the source of every number, or the names of all",
        "autoplan cluster 2x8xA100-80GB",
    )
    cluster.add_argument("name", metavar="NAME", nargs="?", help=f"{_CLUSTER_HELP}; without it the names")
    cluster.add_argument("--nproc", type=_positive, metavar="N", help="devices of local (default all)")
    return top


_MODEL_HELP = "a name of autoplan models, a Hugging Face config.json, FILE.py:FACTORY or PACKAGE.MODULE:FACTORY"
_SEQ_HELP = "tokens of a sequence (default: the model's trained context)"
_CLUSTER_HELP = "local (this machine, measured), a preset, a TOML file, or a shorthand such as 2x8xA100-80GB"


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None], help_text: str, example: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=f"{help_text}.".capitalize(), epilog=f"Example: {example}", allow_abbrev=False
    )
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print JSON (seconds, bytes, fractions) and nothing else")
    command.add_argument("--verbose", action="store_true", help="show warnings, and the traceback of a fault")
    return command


def _profile_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--profile", metavar="FILE", help="plan by these measured times first: autoplan measure --out")
    command.add_argument("--any-machine", action="store_true", help="use a profile of another machine or torch")


def _planning_options(command: argparse.ArgumentParser, default_batch: str) -> None:
    command.add_argument(
        "--global-batch", type=_positive, metavar="N", help=f"samples of one training step (default {default_batch})"
    )
    command.add_argument("--seq", type=_positive, metavar="S", help=_SEQ_HELP)
    command.add_argument("--precision", choices=PRECISIONS, help="default: bf16 where the device has it, fp32 on a CPU")
    command.add_argument("--optimizer", choices=OPTIMIZERS, help=f"default {DEFAULT_OPTIMIZER}")
    command.add_argument("--objective", choices=OBJECTIVES, help=f"what to minimise (default {DEFAULT_OBJECTIVE})")
    command.add_argument(
        "--fix",
        action=_Joined,
        default="",
        metavar="K=V,...",
        help="pin choices, as in pp=4,zero=1,recompute=full; any of pp dp dp_shard tp cp ep zero recompute micro_batch "
        "num_microbatches schedule devices; may be given again",
    )
    command.add_argument(
        "--time-limit",
        type=_positive_number,
        metavar="SECONDS",
        help="stop each solve after this time; the gap says what it cost (default: none)",
    )
    command.add_argument(
        "--expert-loads",
        metavar="FILE",
        help="price experts by these numbers of tokens, which autoplan run --count-experts wrote (default: all equal)",
    )


def _positive(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1, is 0")
    return value


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        what = "not be negative" if text[:1] == "-" and text[1:].isdigit() else "be a whole number"
        raise argparse.ArgumentTypeError(f"must {what}, is {text!r}")
    if len(text) > len(str(LARGEST_COUNT)) or int(text) > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"must be at most {LARGEST_COUNT}")
    return int(text)


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, is {text!r}") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be above 0, is {text}")
    return value


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=1, allow_nan=False))


@contextmanager
def _only_json(wanted: bool) -> Iterator[None]:
    """With --json what a user's model or a library prints goes to stderr: stdout is for the one answer."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    answer = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(answer, 1)
        os.close(answer)


def _print(renderable: Any) -> None:
    # What is printed holds names of the user's: none of it is markup.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=PIPE_COLUMNS)
    with console.capture() as capture:
        console.print(renderable)
    # A table is padded to its width; a file or a copied screen is better without.
    print("\n".join(line.rstrip() for line in capture.get().rstrip().split("\n")))


def _plan(arguments: argparse.Namespace) -> None:
    _check_writable(arguments.out)
    _expert_loads(arguments.expert_loads)  # a wrong file is found here, not after the trace
    engine_named(arguments.engine)
    if arguments.profile:
        Profile.load(arguments.profile)  # a wrong file is found before this machine is measured
    pins = Pins.of(arguments.fix)
    start = time.perf_counter()
    with _only_json(arguments.json), _working(quiet=arguments.json) as progress:
        cluster = cluster_named(arguments.cluster, progress=progress)
        profile = _profile(arguments, cluster)
        progress("loading the model", 0, 0)
        loaded = load_model(arguments.model, sequence_length=arguments.seq, device="meta")
        found = _search(
            arguments, loaded, cluster, pins, arguments.global_batch, arguments.top, progress, profile, arguments.engine
        )
    seconds = time.perf_counter() - start
    if arguments.out:
        found.plans[0].save(arguments.out)
    if arguments.json:
        _print_json(_search_json(found, seconds))
        return
    _print(report.ranking(found.plans, cluster=cluster, tied=found.tied))
    print()
    statistics = found.statistics
    print(
        report.search_text(
            configurations=statistics.configurations,
            bounded=statistics.bounded,
            solved_exactly=statistics.solved_exactly,
            gap=statistics.gap,
            delta=statistics.delta,
            seconds=seconds,
        )
    )
    if (ring := found.plans[0].ring_attention) is not None:
        print(f"the first {report.ring_text(ring)}")
    if profile is not None:
        share = found.plans[0].prediction.measured_share
        print(f"{share:.0%} of the first plan's step rests on measured times, the rest on rates")
    for note in found.plans[0].notes:
        print(f"note: {note}")
    if arguments.out:
        print(f"the first is written to {arguments.out}; autoplan show prints it block by block")


def _trace(arguments: argparse.Namespace) -> None:
    precision = arguments.precision or ("bf16" if arguments.device == "cuda" else "fp32")
    with _only_json(arguments.json), _working(quiet=arguments.json) as progress:
        progress("loading the model", 0, 0)
        loaded = load_model(arguments.model, sequence_length=arguments.seq, device="meta")
        graph = trace(
            loaded.module,
            loaded.batch,
            precision=precision,
            loss_fn=loaded.loss_fn,
            name=loaded.name,
            device_kind=arguments.device,
            progress=lambda what: progress(what, 0, 0),
        )
    if arguments.json:
        _print_json(trace_data(graph, precision=precision))
    else:
        _print(trace_text(graph, precision=precision))


def _search(
    arguments: argparse.Namespace,
    loaded: LoadedModel,
    cluster: Cluster,
    pins: Pins,
    global_batch: int | None,
    top: int,
    progress: OnProgress,
    profile: Profile | Measuring | None,
    engine: str = STOCK,
) -> Search:
    return search_model(
        loaded.module,
        cluster,
        batch=loaded.batch,
        loss_fn=loaded.loss_fn,
        global_batch=global_batch,
        precision=arguments.precision,
        optimizer=arguments.optimizer or DEFAULT_OPTIMIZER,
        objective=arguments.objective or DEFAULT_OBJECTIVE,
        fix=pins,
        top=top,
        name=loaded.name,
        expert_loads=_expert_loads(arguments.expert_loads),
        progress=progress,
        time_limit_seconds=arguments.time_limit,
        profile=profile,
        engine=engine,
    )


def _profile(arguments: argparse.Namespace, cluster: Cluster) -> Profile | None:
    is_local = arguments.cluster.strip().lower() == "local"
    return cli_measure.usable_profile(arguments.profile, cluster, is_local=is_local, any_machine=arguments.any_machine)


def _measure(arguments: argparse.Namespace) -> None:
    try:
        with _only_json(arguments.json), _measuring(quiet=arguments.json) as progress:
            profile, path, left = cli_measure.measure(arguments, progress)
    except KeyboardInterrupt:
        print("what was measured so far is kept; run it again to go on", file=sys.stderr)
        raise
    if not cli_measure.is_first_rank():
        return
    if arguments.json:
        print(profile.dumps(), end="")
    else:
        print(report.profile_text(profile))
        for line in left:
            print(line)
        print(f"kept in {path}; autoplan plan MODEL --profile {path} plans by it")


def _expert_loads(path: str | None) -> Any:
    """What a file of measured loads says; whether it fits the model is seen when that is traced."""
    if path is None:
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = "is not JSON" if isinstance(error, ValueError | RecursionError) else f"cannot be read: {error.strerror}"
        raise PlanError(f"{path} {what}; give a file that autoplan run --count-experts wrote") from error


def _search_json(found: Search, seconds: float) -> dict[str, Any]:
    statistics = found.statistics
    return {
        "search": {
            "seconds": seconds,
            "configurations": statistics.configurations,
            "bounded": statistics.bounded,
            "solved_exactly": statistics.solved_exactly,
            "gap": statistics.gap,
            "delta": statistics.delta,
        },
        "plans": [
            {"rank": rank, "tied_with_first": is_tied, **plan.to_dict()}
            for rank, (plan, is_tied) in enumerate(zip(found.plans, found.tied, strict=True), 1)
        ],
    }


def _check_writable(path: str | None) -> None:
    """Say that a plan cannot be written before the search, not after it."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise PlanError(f"cannot write {path}: there is no folder {folder}")
    if not path or Path(path).is_dir():
        raise PlanError(f"cannot write {path or repr(path)}: it is a folder")
    if not os.access(folder, os.W_OK):
        raise PlanError(f"cannot write {path}: the folder {folder} is read-only")


def _show(arguments: argparse.Namespace) -> None:
    plan = Plan.load(arguments.plan)
    if arguments.sharding:
        if arguments.json:
            _print_json(report.sharding_data(plan))
        else:
            print(report.sharding_text(plan))
    elif arguments.json:
        _print_json(plan.to_dict())
    else:
        print(report.plan_text(plan))


def _diff(arguments: argparse.Namespace) -> None:
    here, there = Plan.load(arguments.here), Plan.load(arguments.there)
    rows = here.diff(there)
    if arguments.json:
        _print_json([{"what": what, "here": one, "there": other} for what, one, other in rows])
    else:
        _print(report.difference(rows, arguments.here, arguments.there))
        if rows and (tie := report.tie_text(here, there)):
            print(tie)


def _validate(arguments: argparse.Namespace) -> None:
    engine = arguments.engine and engine_named(arguments.engine).name
    if arguments.explain:
        if arguments.html:
            raise PlanError("--explain prints the terms of one row; leave out --html")
        _print_json(explain(arguments.files, arguments.explain, engine=engine))
        return
    _check_writable(arguments.html)
    with _only_json(arguments.json), _measuring(quiet=arguments.json) as progress:
        found = validate(arguments.files, engine=engine, progress=progress)
    data = found.to_dict()
    if arguments.html:
        rows = [
            (result.row.id, result.row.prefix, result.measured_seconds, result.prediction.seconds)
            for result in found.results
            if result.prediction is not None and result.measured_seconds
        ]
        write_atomically(Path(arguments.html), accuracy_html(data, rows))
    if arguments.json:
        _print_json(data)
    else:
        _print(accuracy_table(data))


def _audit(arguments: argparse.Namespace) -> None:
    found, changed = cli_audit.audit_run(arguments)
    if arguments.json:
        _print_json(found.to_dict())
        return
    _print(audit_table(found))
    print(found.sentence)
    if changed:
        print(changed)


def _models(arguments: argparse.Namespace) -> None:
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        near = difflib.get_close_matches(unknown[0].lower(), NAMES, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "autoplan models lists them"
        raise ModelError(f"there is no model {unknown[0]!r} in the zoo; {hint}")
    rows = []
    for name in arguments.names or NAMES:
        module, _ = build(name, device="meta")
        rows.append((name, sum(p.numel() for p in module.parameters()), describe(name)))
    if arguments.json:
        _print_json([{"name": n, "parameters": p, "description": d} for n, p, d in rows])
    else:
        _print(report.model_table(rows))


def _cluster(arguments: argparse.Namespace) -> None:
    if arguments.name is None:
        presets, devices = ["local", *(c.name for c in all_presets())], [d.name for d in all_devices()]
        if arguments.json:
            _print_json({"presets": presets, "devices": devices})
        else:
            print("presets: " + ", ".join(presets))
            print("devices: " + ", ".join(devices) + "; as in 2x8xA100-80GB, 2 nodes of 8")
        return
    cluster = _cluster_of(arguments, arguments.name)
    if arguments.json:
        _print_json({**cluster.to_dict(), "fingerprint": cluster.fingerprint})
    else:
        _print(report.cluster_table(cluster))


def _cluster_of(arguments: argparse.Namespace, name: str) -> Cluster:
    if arguments.nproc is not None and name.strip().lower() != "local":
        raise PlanError(f"--nproc says how many devices local has; {name} says itself how many it has")
    with _working(quiet=arguments.json) as progress:
        return cluster_named(name, arguments.nproc, progress)


def _run(arguments: argparse.Namespace) -> None:
    _check_writable(arguments.count_experts)
    _check_writable(arguments.record)
    if arguments.record and arguments.steps <= WARM_UP_STEPS:
        raise RunError(f"--record needs more than the {WARM_UP_STEPS} steps of warm-up; give --steps")
    _expert_loads(arguments.expert_loads)
    pins = Pins.of(arguments.fix)
    given = _given_plan(arguments) if arguments.plan else None
    model = arguments.model or (DEFAULT_MODEL if given is None else given.model)
    if given is not None and arguments.model is None and model not in NAMES:
        raise PlanError(f"the plan is for {model}; name the model before the plan: autoplan run MODEL --plan FILE")
    cluster = _cluster_of(arguments, arguments.cluster)
    profile: Profile | Measuring | None = _profile(arguments, cluster)
    if given is not None:
        _check_cluster(given, measured_cluster(cluster, profile) if isinstance(profile, Profile) else cluster)
    _check_machine(cluster)
    with _only_json(arguments.json), _measuring(quiet=arguments.json) as progress:
        progress("loading the model", 0, 0)
        if arguments.data:
            load_function(arguments.data)  # a wrong one is found here, not after the search
        loaded = load_model(model, sequence_length=arguments.seq, device="meta")
        if arguments.weights:
            check_weights(loaded.module, arguments.weights)  # here too, before the search
        if given is not None:
            _check_graph(given, loaded)
            plans: Sequence[Plan] = (given,)
            tied: Sequence[bool] = ()
        else:
            batch = arguments.global_batch or DEFAULT_RUN_BATCH
            is_local = arguments.cluster.strip().lower() == "local"
            if profile is None and is_local and cluster.device.kind == "cpu" and not arguments.no_measure:
                profile = local_measuring(cluster, batch, progress)
            searched = _search(arguments, loaded, cluster, pins, batch, DEFAULT_TOP, progress, profile)
            plans, tied = searched.plans, searched.tied
        plan = plans[0]
    if plan.engine != STOCK:
        print(f"warning: the plan has the times of {plan.engine}; stock PyTorch, which runs it, takes others",
              file=sys.stderr)  # fmt: skip
    if not plan.prediction.fits:
        raise PlanError(
            f"the plan does not fit: it needs {max(plan.prediction.peak_bytes) / 2**30:.1f} GiB on a device, which has "
            f"{plan.prediction.capacity_bytes / 2**30:.1f} GiB; fix fewer choices, or use a smaller batch"
        )
    if not arguments.json:
        if given is None:
            _print(report.ranking(plans, cluster=cluster, tied=tied))
            print()
        print(report.plan_text(plan), end="\n\n")
        sys.stdout.flush()
    job = Job(
        model=_absolute(model),
        steps=arguments.steps,
        seed=arguments.seed,
        learning_rate=arguments.lr,
        sequence_length=arguments.seq,
        data=_absolute(arguments.data) if arguments.data else None,
        check="replicate" if arguments.check == "replicate" else not arguments.no_check,
        weights=str(Path(arguments.weights).resolve()) if arguments.weights else None,
        needs_experts=arguments.count_experts is not None,
        machine=asdict(this_machine(device_kind(), cluster.num_devices)),
    )
    with _training(quiet=arguments.json, steps=arguments.steps) as on_step:
        training = launch(job, plan, on_step)
    if arguments.record and training.record is not None:
        training.record.save(arguments.record)
    if arguments.count_experts:
        write_atomically(Path(arguments.count_experts), json.dumps(training.expert_loads, indent=1) + "\n")
    if arguments.json:
        _print_json(_training_json(plan, training))
        return
    print(f"loss {training.losses[0]:.3f} -> {training.losses[-1]:.3f} in {len(training.losses)} steps")
    if training.data == RANDOM_DATA:
        print("batches were random values like the example batch: no loss means anything; --data trains on yours")
    print(training.check, end="\n\n")
    if training.record is not None:
        audited = audit(training.record)
        _print(audit_table(audited))
        print(audited.sentence)
        return
    _print(
        report.comparison(
            predicted_step_seconds=plan.prediction.step_seconds,
            measured_step_seconds=training.measured_step_seconds,
            predicted_peak_bytes=plan.prediction.peak_bytes,
            measured_peak_bytes=training.peak_bytes,
            memory_kind=memory_kind(),
        )
    )


def _training_json(plan: Plan, training: Training) -> dict[str, Any]:
    # A run that diverges has no number for its loss, and neither has JSON.
    return {
        "losses": [loss if math.isfinite(loss) else None for loss in training.losses],
        "predicted_step_seconds": plan.prediction.step_seconds,
        "measured_step_seconds": training.measured_step_seconds,
        "predicted_peak_bytes": list(plan.prediction.peak_bytes),
        "peak_bytes": list(training.peak_bytes),
        "peak_bytes_kind": memory_kind(),
        "audit": None if training.record is None else audit(training.record).to_dict(),
        "check": training.check,
        "data": training.data,
        "expert_loads": training.expert_loads,
        "plan": plan.to_dict(),
    }


def _given_plan(arguments: argparse.Namespace) -> Plan:
    """The plan of `run --plan`; options that it has decided already are refused, not ignored."""
    decided = {
        "--global-batch": arguments.global_batch,
        "--precision": arguments.precision,
        "--optimizer": arguments.optimizer,
        "--objective": arguments.objective,
        "--fix": arguments.fix,
        "--time-limit": arguments.time_limit,
        "--expert-loads": arguments.expert_loads,
    }
    twice = [option for option, value in decided.items() if value]
    if twice:
        raise PlanError(f"{' and '.join(twice)} cannot change a plan that is made; leave out either that or --plan")
    return Plan.load(arguments.plan)


def _check_cluster(plan: Plan, cluster: Cluster) -> None:
    if plan.cluster_fingerprint != cluster.fingerprint:
        raise PlanError(
            f"the plan was made for another cluster ({plan.cluster}, fingerprint {plan.cluster_fingerprint[:12]}; "
            f"this is {cluster.name}, {cluster.fingerprint[:12]}); make it again with autoplan plan --cluster local"
        )


def _check_machine(cluster: Cluster) -> None:
    """Refuse a cluster that this machine is not."""
    if cluster.device.kind != device_kind():
        raise RunError(
            f"{cluster.name} has {cluster.device.name} devices, this machine trains on {device_kind()}; "
            "use --cluster local, or copy the plan to that machine"
        )
    if cluster.num_nodes > 1 or cluster.num_devices > num_local_devices():
        raise RunError(
            f"{cluster.name} has {cluster.num_devices} devices on {cluster.num_nodes} node(s), autoplan run uses the "
            "devices of one machine; plan with --out and train by plan.apply under torchrun on every node"
        )


def _check_graph(plan: Plan, loaded: LoadedModel) -> None:
    graph = trace(
        loaded.module,
        loaded.batch,
        precision=plan.precision,
        loss_fn=loaded.loss_fn,
        name=loaded.name,
        device_kind=device_kind(),
    )
    if graph.fingerprint != plan.graph_fingerprint:
        raise PlanError(
            f"the plan was made for another model, sequence length or release ({plan.model}, graph "
            f"{plan.graph_fingerprint[:12]}; this is {loaded.name}, {graph.fingerprint[:12]}); make it again"
        )


def _absolute(spec: str) -> str:
    """A path in a spec made absolute, so that what ranks load is what was loaded here."""
    if spec in NAMES:
        return spec
    head, colon, tail = spec.rpartition(":")
    path = head if colon else spec
    if Path(path).exists():
        return f"{Path(path).resolve()}{colon}{tail}" if colon else str(Path(path).resolve())
    return spec


@contextmanager
def _working(*, quiet: bool) -> Iterator[OnProgress]:
    """A status line on stderr while work goes on; nothing when quiet or not on a terminal."""
    console = Console(stderr=True, emoji=False)
    if quiet or not console.is_terminal:
        yield lambda _what, _done, _of: None
        return
    with console.status("starting") as status:
        yield lambda what, done, of: status.update(escape(f"{what} {done} of {of}" if of else what))


@contextmanager
def _measuring(*, quiet: bool) -> Iterator[OnProgress]:
    """A progress bar on stderr while work goes on; nothing when quiet or not on a terminal."""
    console = Console(stderr=True, emoji=False)
    if quiet or not console.is_terminal:
        yield lambda _what, _done, _of: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, of: bar.update(task, description=escape(what), completed=done, total=of or None)


@contextmanager
def _training(*, quiet: bool, steps: int) -> Iterator[OnStep]:
    """A progress bar with the loss on a terminal; without one a line every tenth of the steps."""
    console = Console(stderr=True, highlight=False, emoji=False)
    if quiet:
        yield lambda _step, _loss, _seconds: None
        return
    if not console.is_terminal:
        every = max(1, steps // 10)

        def line(step: int, loss: float, seconds: float) -> None:
            if step % every == 0 or step == steps - 1:
                console.print(f"step {step + 1} of {steps}  loss {loss:.3f}  {seconds:.3f} s", soft_wrap=True)

        yield line
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=steps, loss="-")
        yield lambda step, loss, _seconds: bar.update(task, completed=step + 1, loss=f"{loss:.3f}")
