"""The command line as tests use it: in this process, on a CPU cluster whose numbers are in a file."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from planner.cli import main

TWO_CORES = str(Path(__file__).with_name("two_cores.json"))
A100S = "1x8xA100-80GB"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class CommandLine:
    """`cli("plan", "gpt2")`: one command; `cli.error(...)`: one that is refused, its only line on stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Outcome:
        self._capsys.readouterr()  # what the test itself made a library say
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as usage:
            code = int(str(usage.code))
        out, err = self._capsys.readouterr()
        return Outcome(code, out, err)

    def error(self, *arguments: object, code: int = 1) -> str:
        outcome = self(*arguments)
        assert outcome.code == code, outcome
        assert outcome.out == ""
        [line] = outcome.err.splitlines()
        assert line.startswith("error: ")
        assert "a fault in autoplan" not in line, line
        return line.removeprefix("error: ")
