"""Ways to do less work per gradient, measured: what pays is in the package, what does not is in docs/performance.md.

    python benchmarks/less_work.py [--rounds 7]

Rounds are interleaved. Gradients are compared with the exact ones of the same noise.
"""

import argparse
import sys

import torch
from bench import Problem, by_package, distance, objective, ratio, source, timed

import mcvae


def optimizers(rounds: int) -> None:
    """An update of MNIST's model by Adam."""
    cases = {}
    for name, options in {
        "one by one": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }.items():
        model = Problem(1).fast
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        cases[name] = torch.optim.Adam(model.parameters(), 1e-6, **options).step
    problem = Problem(100)
    cases["VAE step"] = lambda: problem.gradients(problem.fast, by_package(objective("vae")))
    seconds = timed(cases, 5 * rounds)
    for name in ("one by one", "foreach", "fused"):
        print(f"Adam, {name}: {100 * ratio(seconds, name, 'VAE step'):.1f} % of a VAE step")


def half_precision(rounds: int) -> None:
    """Networks in bfloat16."""
    problem = Problem(100)
    for name, settings in {"VAE": ("vae",), "L-MCVAE, K=5": ("l-mcvae", 5)}.items():
        loss = by_package(objective(*settings))

        def half(loss=loss):
            with torch.autocast("cpu", torch.bfloat16):
                return problem.gradients(problem.fast, loss)

        cases = {"float32": lambda loss=loss: problem.gradients(problem.fast, loss), "bfloat16": half}
        seconds = timed(cases, rounds)
        print(
            f"{name}: float32 / bfloat16 {ratio(seconds, 'float32', 'bfloat16'):.2f}, gradient off by "
            f"{distance(half(), cases['float32']()):.0e}"
        )


def negligible_chains() -> None:
    """Share of the chains with less than a thousandth of their datum's weight, whose gradients could be left out."""
    problem = Problem(100)
    for name, settings in {"IWAE, 10 samples": ("iwae", 0, 10), "L-MCVAE, K=2, 4 chains": ("l-mcvae", 2, 4)}.items():
        with torch.no_grad():
            estimate = objective(*settings).run(problem.fast.bridge(problem.x), generator=source())
        share = estimate.log_weight.softmax(0)
        print(f"{name}: {100 * (share < 1e-3).double().mean():.0f} % of the chains have a share below 0.001")


def shared_noise(rounds: int) -> None:
    """Drawing noise, next to everything else."""
    problem = Problem(100)
    noise = torch.empty(1, 100, 64)
    cases = {
        "noise": lambda: [noise.normal_() for _ in range(5)],
        "L-MCVAE, K=5": lambda: problem.gradients(problem.fast, by_package(objective("l-mcvae", 5))),
    }
    seconds = timed(cases, rounds)
    print(f"noise of five steps: {100 * ratio(seconds, 'noise', 'L-MCVAE, K=5'):.2f} % of a step")


def early_scores(rounds: int) -> None:
    """The gradient through the score of the first states left out: biased, and cheaper by what it leaves out."""
    problem = Problem(100)
    exact = by_package(objective("l-mcvae", 5))

    def without(bridge: mcvae.Bridge) -> torch.Tensor:
        bridge = mcvae.Bridge(bridge.initial, _Stopped(bridge.log_joint), bridge.path, bridge.context)
        return objective("l-mcvae", 5)(bridge, generator=source()).loss.mean()

    cases = {
        "exact": lambda: problem.gradients(problem.fast, exact),
        "stopped": lambda: torch.autograd.grad(
            without(problem.fast.bridge(problem.x)), list(problem.fast.parameters()), allow_unused=True
        ),
    }
    seconds = timed(cases, rounds)
    print(
        f"scores without a gradient: exact / stopped {ratio(seconds, 'exact', 'stopped'):.2f}, gradient off by "
        f"{distance(cases['stopped'](), cases['exact']()):.2f}"
    )


class _Stopped:
    """A density whose score is a constant to the gradient."""

    def __init__(self, log_joint):
        self.log_joint = log_joint

    def __call__(self, z):
        return self.log_joint(z)

    def value_and_score(self, z):
        value = self.log_joint(z)
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            (score,) = torch.autograd.grad(self.log_joint(leaf).sum(), leaf)
        return value, score


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    mcvae.keep_memory()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", file=sys.stderr)
    optimizers(rounds)
    half_precision(rounds)
    negligible_chains()
    shared_noise(rounds)
    early_scores(rounds)


if __name__ == "__main__":
    main()
