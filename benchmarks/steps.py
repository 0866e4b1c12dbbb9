"""Seconds and decoder passes per training step, against a reference written straight from Algorithms 1 and 2.

Interleaved rounds in one process; medians, and ratios paired by round. The reference takes a fresh autograd gradient
wherever the text has ∇log γ and evaluates every density where the text has one. Before timing, both are checked to
give the same gradients from the same noise, in float64.

    python benchmarks/steps.py [--rounds 15] [--batch 100] [--latent 64] [--hidden 512]
"""

import argparse
import math
import statistics
import time

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Independent, Normal

import mcvae


class Model:
    """An MLP auto-encoder of 28 × 28 binary images that counts its decoder passes."""

    def __init__(self, latent: int, hidden: int):
        self.encoder_net = nn.Sequential(nn.Linear(784, hidden), nn.SiLU(), nn.Linear(hidden, 2 * latent))
        self.decoder_net = nn.Sequential(nn.Linear(latent, hidden), nn.SiLU(), nn.Linear(hidden, 784))
        self.calls = 0
        self.model = mcvae.LatentVariableModel(self.encoder, self.decoder)

    def encoder(self, x: Tensor) -> Independent:
        loc, log_scale = self.encoder_net(x).chunk(2, -1)
        return Independent(Normal(loc, log_scale.exp()), 1)

    def decoder(self, z: Tensor) -> Independent:
        self.calls += 1
        return Independent(Bernoulli(logits=self.decoder_net(z)), 1)

    def parameters(self) -> list[nn.Parameter]:
        return [*self.encoder_net.parameters(), *self.decoder_net.parameters()]


def reference(bridge: mcvae.Bridge, num_samples: int, num_steps: int, step: float, adjusted: bool, seed: int):
    """W and log A of Algorithm 1 (adjusted=False) or 2, with K interior temperatures, as the text has them."""
    source = torch.Generator().manual_seed(seed)
    z = mcvae.randomness.draw(bridge.initial, (num_samples,), source)

    def log_gamma(z: Tensor, beta: float) -> Tensor:
        return (1 - beta) * bridge.initial.log_prob(z) + beta * bridge.log_joint(z)

    def gradient(z: Tensor, beta: float) -> Tensor:
        return torch.autograd.grad(log_gamma(z, beta).sum(), z, create_graph=True)[0]

    def log_m(origin: Tensor, destination: Tensor, beta: float) -> Tensor:
        mean = origin + step * gradient(origin, beta)
        return Normal(mean, math.sqrt(2 * step)).log_prob(destination).sum(-1)

    log_weight = -bridge.initial.log_prob(z) if not adjusted else torch.zeros(z.shape[:2])
    log_accept, previous = torch.zeros(z.shape[:2]), 0.0
    for k in range(1, num_steps + 1):
        beta = k / (num_steps + 1)
        noise = torch.randn(z.shape, generator=source)
        if adjusted:
            log_weight = log_weight + log_gamma(z, beta) - log_gamma(z, previous)
            threshold = torch.rand(z.shape[:2], generator=source).log()
        proposal = z + step * gradient(z, beta) + math.sqrt(2 * step) * noise
        log_ratio = log_m(proposal, z, beta) - log_m(z, proposal, beta)
        if adjusted:
            log_alpha = (log_gamma(proposal, beta) - log_gamma(z, beta) + log_ratio).clamp(max=0)
            accepted = threshold < log_alpha
            log_accept = log_accept + torch.where(accepted, log_alpha, torch.log1p(-log_alpha.clamp(max=-1e-12).exp()))
            z = torch.where(accepted.unsqueeze(-1), proposal, z)
        else:
            log_weight, z = log_weight + log_ratio, proposal
        previous = beta
    if adjusted:
        return log_weight + log_gamma(z, 1.0) - log_gamma(z, previous), log_accept
    return log_weight + bridge.log_joint(z), log_accept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--latent", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args()
    torch.manual_seed(0)
    network = Model(args.latent, args.hidden)
    images = (torch.rand(args.batch, 784) < 0.3).float()
    step = 0.01

    def bridge() -> mcvae.Bridge:
        return network.model.bridge(images.to(network.parameters()[0]))

    def ours(objective: mcvae.AnnealedEstimator):
        return lambda: objective(bridge(), generator=torch.Generator().manual_seed(1)).loss.mean()

    def theirs(num_samples: int, num_steps: int, adjusted: bool):
        def loss() -> Tensor:
            w, log_a = reference(bridge(), num_samples, num_steps, step, adjusted, seed=1)
            signal = (w - w.mean(0)).detach() * num_samples / max(num_samples - 1, 1)
            return -(w + signal * log_a).mean()

        return loss

    def langevin(k: int) -> mcvae.AnnealedEstimator:
        return mcvae.recipes.l_mcvae(k, args.latent, interior=True, step_sizes=mcvae.Fixed(k, step))

    def annealed(k: int) -> mcvae.AnnealedEstimator:
        return mcvae.recipes.a_mcvae(k, args.latent, step_sizes=mcvae.Fixed(k, step))

    cases = {
        "VAE": ours(mcvae.recipes.vae()),
        "IWAE-10": ours(mcvae.recipes.iwae(10)),
        "L-MCVAE K=5": ours(langevin(5)),
        "L-MCVAE K=5, reference": theirs(1, 5, adjusted=False),
        "A-MCVAE K=5, 5 samples": ours(annealed(5)),
        "A-MCVAE K=5, 5 samples, reference": theirs(5, 5, adjusted=True),
    }
    torch.set_default_dtype(torch.float64)  # where rounding cannot hide a difference
    network.encoder_net.double(), network.decoder_net.double()
    for name in ("L-MCVAE K=5", "A-MCVAE K=5, 5 samples"):
        pairs = [torch.autograd.grad(cases[key](), network.parameters()) for key in (name, f"{name}, reference")]
        worst = max(float((a - b).norm() / b.norm()) for a, b in zip(*pairs, strict=True))
        print(f"{name}: gradient differs from the reference by {worst:.1e} (relative)")
        if worst > 1e-6:  # step sizes are float32
            raise SystemExit("the two do not compute the same gradient; timings would mean nothing")
    torch.set_default_dtype(torch.float32)
    network.encoder_net.float(), network.decoder_net.float()

    seconds: dict[str, list[float]] = {name: [] for name in cases}
    calls = {}
    for round_number in range(args.rounds + 1):
        for name, loss in cases.items():
            network.calls, start = 0, time.perf_counter()
            torch.autograd.grad(loss(), network.parameters())
            calls[name] = network.calls
            if round_number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)

    def ratio(slow: str, fast: str) -> str:
        paired = [a / b for a, b in zip(seconds[slow], seconds[fast], strict=True)]
        return f"{statistics.median(paired):.2f}"

    print(f"\nbatch {args.batch}, {torch.get_num_threads()} threads, median of {args.rounds} interleaved rounds\n")
    print("| training step | ms | decoder passes | times a VAE step |")
    print("|---|---|---|---|")
    for name, times in seconds.items():
        print(f"| {name} | {1000 * statistics.median(times):.1f} | {calls[name]} | {ratio(name, 'VAE')} |")
    for name in ("L-MCVAE K=5", "A-MCVAE K=5, 5 samples"):
        print(f"\n{name}: reference / ours = {ratio(f'{name}, reference', name)}")


if __name__ == "__main__":
    main()
