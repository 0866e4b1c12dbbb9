"""What `estimate_log_evidence` costs on sonar with its defaults; also runs with older editions of mcvae.

    python benchmarks/evidence_of_sonar.py ../data/posteriors/sonar.csv
    git worktree add /tmp/first e06881b  # the last commit of the first edition
    PYTHONPATH=/tmp/first/src python benchmarks/evidence_of_sonar.py ../data/posteriors/sonar.csv

Seconds are those of the processor, for one thread.
"""

import csv
import sys
import time

import torch
from torch import Tensor
from torch.distributions import Independent, Normal

import mcvae


def main(path: str) -> None:
    """Print a line per seed."""
    torch.set_num_threads(1)
    with open(path) as file:
        rows = [row for row in csv.reader(file) if row]
    features = torch.tensor([[float(value) for value in row[:-1]] for row in rows])
    labels = torch.tensor([1.0 if row[-1] == rows[0][-1] else -1.0 for row in rows]).unsqueeze(1)
    design = torch.cat([torch.ones(len(rows), 1), (features - features.mean(0)) / features.std(0)], 1)
    prior = Independent(Normal(torch.zeros(1, design.shape[1]), torch.ones(1, design.shape[1])), 1)

    def log_joint(z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(z @ (labels * design).T).sum(-1) + prior.log_prob(z)

    for seed in range(3):
        begin = time.process_time()
        evidence = mcvae.estimate_log_evidence(log_joint, prior, generator=torch.Generator().manual_seed(seed))
        seconds = time.process_time() - begin
        value, error = float(evidence.log_evidence), float(evidence.standard_error)
        print(f"{value:.2f} ± {error:.2f}, K = {evidence.num_steps}, {evidence.verdict()}, {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
