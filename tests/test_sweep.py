"""Cells: done once, resumed, retried, shared by sweeps; and a killed worker loses nothing."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mcvae.experiments.cells import Cell, SweepError, look, run_cells
from mcvae.runs.plain import RunError
from mcvae.runs.records import Record, read_records

HERE = "sweep_tasks"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def cell(name, task="write", **settings):
    return Cell(name, f"{HERE}:{task}", settings)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing happened within a minute"
        time.sleep(0.02)


def test_records_come_back_in_order_and_cells_are_done_once(tmp_path):
    cells = [cell("b", value=2.0), cell("a", value=1.0)]
    found = run_cells(tmp_path, cells)
    assert [record.value for record in found] == [2.0, 1.0]
    assert run_cells(tmp_path, cells) == found
    assert (tmp_path / "a" / "calls").read_text() == "x"
    events = [json.loads(line)["event"] for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert events == ["attempt 1", "done"] * 2


@pytest.mark.slow
def test_two_workers_give_the_same_records(tmp_path):
    cells = [cell(f"c{index}", value=float(index)) for index in range(5)]
    assert run_cells(tmp_path / "two", cells, workers=2) == run_cells(tmp_path / "none", cells)


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "threads"), [("3", 3.0), ("", max(1, (os.cpu_count() or 1) // 2))])
def test_workers_have_the_threads_that_the_user_chose(tmp_path, monkeypatch, chosen, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    (found,) = run_cells(tmp_path, [cell("a", "count_threads")], workers=2)
    assert found.value == threads


def test_a_failure_is_retried_then_named_and_the_others_go_on(tmp_path):
    cells = [cell("bad", "fail", times=99), cell("shaky", "fail", times=1), cell("good", value=1.0)]
    with pytest.raises(SweepError, match="1 of 3 cells are not done:\n  bad: RuntimeError: no luck"):
        run_cells(tmp_path, cells, retries=1)
    assert [progress.status for progress in look(tmp_path, cells)] == ["failed", "done", "done"]
    assert "Traceback" in (tmp_path / "bad" / "cell.log").read_text()
    assert (tmp_path / "good" / "calls").read_text() == "x"
    (tmp_path / "bad" / "allowed").touch()
    assert len(run_cells(tmp_path, cells)) == 3  # a later sweep tries again, and only what is missing
    assert (tmp_path / "good" / "calls").read_text() == "x"


def test_other_settings_are_not_taken_for_the_same_cell(tmp_path):
    run_cells(tmp_path, [cell("a", value=1.0)])
    with pytest.raises(SweepError, match="made with other settings"):
        run_cells(tmp_path, [cell("a", value=2.0)])


@pytest.mark.parametrize("name", ["../a", "a/b", ".hidden"])
def test_a_cell_cannot_leave_its_folder(tmp_path, name):
    with pytest.raises(ValueError, match="named like a folder"):
        run_cells(tmp_path, [cell(name)])
    assert not (tmp_path.parent / "a").exists()


def test_a_cell_that_somebody_else_is_doing_is_left_to_them(tmp_path):
    code = (
        "from pathlib import Path; from mcvae.experiments.cells import Cell, run_cells; "
        f"run_cells(Path({str(tmp_path)!r}), [Cell('a', '{HERE}:hold', {{}})])"
    )
    other = subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT)
    try:
        wait_until((tmp_path / "a" / "calls").exists)
        with pytest.raises(SweepError, match="a: running"):
            run_cells(tmp_path, [cell("a", "hold")])
        (tmp_path / "a" / "release").touch()
        assert other.wait(30) == 0
    finally:
        other.kill()
    assert len(run_cells(tmp_path, [cell("a", "hold")])) == 1
    assert (tmp_path / "a" / "calls").read_text() == "x"


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_cell_done_again(tmp_path):
    cells = [cell("a", "die_once"), cell("b", value=1.0)]
    assert len(run_cells(tmp_path, cells, workers=1, retries=1)) == 2
    assert (tmp_path / "a" / "calls").read_text() == "xx"


def test_workers_do_not_outlive_a_killed_driver(tmp_path):
    code = (
        "from pathlib import Path; from mcvae.experiments.cells import Cell, run_cells\n"
        f"if __name__ == '__main__': run_cells(Path({str(tmp_path)!r}), "
        f"[Cell('a', '{HERE}:hold', {{}})], workers=1)"
    )
    script = tmp_path / "driver.py"
    script.write_text(code)
    driver = subprocess.Popen([sys.executable, str(script)], env=ENVIRONMENT)
    wait_until((tmp_path / "a" / "calls").exists)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    cells = [cell("a", "hold")]
    wait_until(lambda: look(tmp_path, cells)[0].status != "running")
    assert look(tmp_path, cells)[0].status == "failed"


def test_damaged_records_are_named(tmp_path):
    run_cells(tmp_path, [cell("a", value=1.0)])
    path = tmp_path / "a" / "records.csv"
    path.write_text("nonsense\n1\n")
    with pytest.raises(RunError, match="is not a table of records"):
        read_records(path)


def test_records_survive_a_file(tmp_path):
    from mcvae.runs.records import write_records

    records = [Record("e", "d", "m", "nll", 1.5, 3, 10, 0.1, 2.0, None, "paper", 1e6, None)]
    write_records(tmp_path / "records.csv", records)
    assert read_records(tmp_path / "records.csv") == records
