"""What independent witnesses add to the cost of an evidence, on the easy densities of tests/densities.py.

    python benchmarks/witnesses.py

Seconds are those of the processor, for one thread.
"""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import mcvae

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from densities import Density, corpus


def cost(density: Density, check: bool) -> tuple[int, int, float]:
    """Calls of the density, rows in them, and seconds."""
    rows = list[int]()

    def counted(z: Tensor) -> Tensor:
        rows.append(z[..., 0].numel())
        return density.log_joint(z)

    begin = time.process_time()
    mcvae.estimate_log_evidence(counted, density.initial, check=check, seed=0)
    return len(rows), sum(rows), time.process_time() - begin


def main() -> None:
    """Print a line per density, and their sum."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    total = torch.zeros(2, 3)
    print(f"{'without and with witnesses':30s} {'calls':>13s} {'rows':>16s} {'seconds':>13s}")
    for name, density in corpus().items():
        if density.easy:
            found = torch.tensor([cost(density, check) for check in (False, True)])
            total += found
            _show(name, found)
    _show("all", total)


def _show(name: str, found: Tensor) -> None:
    (calls, rows, seconds), (more_calls, more_rows, more_seconds) = found.tolist()
    print(
        f"{name:30s} {calls:6.0f} {more_calls:6.0f} {rows:8.0f} {more_rows:7.0f} {seconds:7.2f} {more_seconds:5.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
