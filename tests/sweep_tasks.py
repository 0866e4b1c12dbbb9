"""Tasks for tests of sweeps: they note how often they were called."""

import os
import signal
import time

from mcvae.runs.records import Record


def _call(folder):
    with open(folder / "calls", "a") as file:
        file.write("x")
    return len((folder / "calls").read_text())


def write(folder, settings):
    _call(folder)
    return [Record("test", "none", folder.name, "value", settings["value"])]


def fail(folder, settings):
    if _call(folder) <= settings["times"] and not (folder / "allowed").exists():
        raise RuntimeError("no luck")
    return [Record("test", "none", folder.name, "value", 0.0)]


def hold(folder, settings):
    """Work until a file called release appears."""
    _call(folder)
    while not (folder / "release").exists():
        time.sleep(0.02)
    return [Record("test", "none", folder.name, "value", 0.0)]


def die_once(folder, settings):
    if _call(folder) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [Record("test", "none", folder.name, "value", 0.0)]


def count_threads(folder, settings):
    import torch

    return [Record("test", "none", folder.name, "threads", float(torch.get_num_threads()))]
