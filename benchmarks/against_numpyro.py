"""One optimiser step of uncorrected Hamiltonian annealing on the sonar posterior: ours, compiled or not, and numpyro's.

    MCVAE_DATA=... python benchmarks/against_numpyro.py                        # ours
    MCVAE_DATA=... OTHER/bin/python benchmarks/against_numpyro.py --numpyro    # numpyro's, in an environment of its own

numpyro is no dependency: `python -m venv OTHER && OTHER/bin/pip install jax numpyro`. With `--other OTHER/bin/python`
the first command calls the second and prints the ratio. Times are those of the processor, so that other work on the
machine does not count, for one thread.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

STEPS, CHAINS = (8, 64), 5


def median_ms(step: Callable[[], object], repeats: int) -> float:
    """Median processor time of a step."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        step()
        times.append(1e3 * (time.process_time() - begin))
    return statistics.median(times)


def ours() -> dict[str, dict[str, float]]:
    """Milliseconds per step and seconds to compile, by K."""
    import torch
    from torch.distributions import Independent, Normal

    import mcvae
    from mcvae.experiments.densities import load_target

    torch.set_num_threads(1)
    target, found = load_target("sonar"), {}
    for number in STEPS:
        row = {}
        for compiled in (False, True):
            loc = torch.zeros(1, target.latent_dim, requires_grad=True)
            log_scale = torch.zeros(1, target.latent_dim, requires_grad=True)
            objective = mcvae.recipes.uha(
                number,
                target.latent_dim,
                step_sizes=mcvae.LearnedStepSizes(number, 0.01),
                num_samples=CHAINS,
                compile=compiled,
            )
            optimizer = torch.optim.Adam([loc, log_scale, *objective.parameters()], 1e-3, fused=True)

            def step() -> None:
                initial = Independent(Normal(loc, log_scale.exp(), validate_args=False), 1)  # noqa: B023
                loss = objective(mcvae.Bridge(initial, target.log_joint)).loss.mean()  # noqa: B023
                optimizer.zero_grad()  # noqa: B023
                loss.backward()
                optimizer.step()  # noqa: B023

            begin = time.process_time()
            step()
            row["compiled_first_s" if compiled else "first_s"] = time.process_time() - begin
            row["compiled_ms" if compiled else "ms"] = median_ms(step, 100 if compiled else 20)
        found[str(number)] = row
    return found


def numpyro_steps() -> dict[str, dict[str, float]]:
    """The same of numpyro's AutoDAIS."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    import jax
    import numpy as np
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoDAIS

    with (Path(os.environ.get("MCVAE_DATA", "data")) / "posteriors" / "sonar.csv").open() as file:
        table = np.array([[float(value) for value in row] for row in csv.reader(file)])
    x, y = table[:, :-1], (table[:, -1] > 0).astype(float)
    x = np.concatenate([np.ones((len(x), 1)), (x - x.mean(0)) / x.std(0)], 1)

    def model() -> None:
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights).to_event(1), obs=y)

    found = {}
    for number in STEPS:
        loss = Trace_ELBO(num_particles=CHAINS, vectorize_particles=True)
        svi = SVI(model, AutoDAIS(model, K=number), numpyro.optim.Adam(1e-3), loss)
        state, update = svi.init(jax.random.PRNGKey(0)), jax.jit(svi.update)

        def step() -> None:
            nonlocal state
            state, value = update(state)  # noqa: B023
            value.block_until_ready()

        begin = time.process_time()
        step()
        found[str(number)] = {"first_s": time.process_time() - begin, "ms": median_ms(step, 200)}
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numpyro", action="store_true", help="measure numpyro in this environment, as JSON")
    parser.add_argument("--other", help="a Python that has numpyro")
    arguments = parser.parse_args()
    if arguments.numpyro:
        try:
            print(json.dumps(numpyro_steps()))
        except ModuleNotFoundError as error:
            sys.exit(f"skipped: {error.name} is not installed here. pip install jax numpyro, in a venv of its own.")
        return
    theirs: dict[str, dict[str, float]] = {}
    if arguments.other:
        done = subprocess.run([arguments.other, __file__, "--numpyro"], capture_output=True, text=True, check=False)
        theirs = json.loads(done.stdout) if done.returncode == 0 else {}
        if not theirs:
            print(done.stderr.strip().splitlines()[-1])
    else:
        print("numpyro: skipped; name a Python that has it with --other.")
    for number, row in ours().items():
        line = (
            f"K = {number}: {row['ms']:.2f} ms, compiled {row['compiled_ms']:.2f} ms ({row['compiled_first_s']:.1f} s)"
        )
        if number in theirs:
            other = theirs[number]
            ratio = row["compiled_ms"] / other["ms"]
            line += f"; numpyro {other['ms']:.2f} ms ({other['first_s']:.1f} s): {ratio:.1f} times"
        print(line)


if __name__ == "__main__":
    main()
