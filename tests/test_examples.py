import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planner.cluster import Cluster
from planner.errors import ClusterError
from planner.measure import local as measure
from planner.runtime.machine import num_cores
from tests.command_line import TWO_CORES

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "train.py"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="local is then the CUDA devices")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The machine is measured already: `local` is the cluster of the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("AUTOPLAN_CACHE", raising=False)
    for num_processes in {1, 2, num_cores()}:
        path = measure._cache_path(num_processes)
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(Cluster.load(TWO_CORES).to_json())
    return tmp_path


def _run(command, folder, **environment):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )


def _losses(done):
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)$", done.stdout, re.MULTILINE)]


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_the_script_trains_the_same_alone_and_under_torchrun(cache):
    alone = _losses(_run([SCRIPT], cache))
    together = _losses(_run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, SCRIPT], cache))

    assert len(alone) == len(together) == 5
    assert together == pytest.approx(alone, abs=2e-3)
    assert alone[-1] < 3.0


def test_the_script_is_short_enough_to_read():
    code = [line for line in SCRIPT.read_text().splitlines() if line and not line.startswith(('"""', "import", "from"))]

    assert len(code) <= 12


def test_ranks_cannot_measure_each_for_itself(cache, monkeypatch):
    monkeypatch.setenv("AUTOPLAN_CACHE", "off")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(ClusterError, match=r"ranks must plan for the same numbers.*leave the cache on"):
            measure.local_cluster()


def test_a_later_rank_takes_what_the_first_has_measured(cache, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")

    assert measure.local_cluster() == Cluster.load(TWO_CORES)


def test_a_later_rank_does_not_measure_where_the_first_has_a_corrupt_file(cache, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(measure, "_WAIT_SECONDS", 0.3)
    measure._cache_path(2).write_text("{")
    with pytest.raises(ClusterError, match="the first rank measured nothing"):
        measure.local_cluster()


def test_the_readme_shows_the_script_as_it_is():
    code = SCRIPT.read_text().partition('"""\n\n')[2]

    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()


def test_the_readme_snippet_runs(tmp_path):
    """The second Python block: a model, a batch and a loss of one's own."""
    snippet = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    (tmp_path / "snippet.py").write_text(snippet)

    done = _run(["snippet.py"], tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pp 2 ")
    assert done.stdout.strip().endswith("True")
