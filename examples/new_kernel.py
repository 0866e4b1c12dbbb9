"""A new kernel in one class: preconditioned Crank–Nicolson, whose proposals leave the prior N(0, I) as it is.

z' = √(1 − η²) z + η ξ needs no gradient. Because it is reversible for N(0, I), its acceptance contains only what the
target adds to N(0, I). All that a kernel owes the estimator is `log_ratio`; E[w] = p(x) then holds by itself.
"""

import torch
from torch import Generator, Tensor
from torch.distributions import Independent, Normal

import mcvae


class CrankNicolson(mcvae.Kernel):
    """Accept z' with probability min(1, γ(z') N(z) / (γ(z) N(z')))."""

    uses_score = False
    accepts = True
    target_acceptance = 0.234

    def forward(
        self, bridge: mcvae.Bridge, state: mcvae.State, step: mcvae.Step, *, generator: Generator | None = None
    ) -> mcvae.Transition:
        """One step at temperature `step.beta`."""
        old, size = state.point, step.step_size
        noise = mcvae.standard_normal(old.z, generator)  # unlike torch.randn, right on any device and any process
        new = bridge.evaluate((1 - size**2).sqrt() * old.z + size * noise, with_score=False, fallback=old.z)
        gain = bridge.log_density(new, step.beta) - bridge.log_density(old, step.beta)
        log_alpha = (gain + 0.5 * (new.z.square() - old.z.square()).sum(-1)).clamp(max=0)
        accepted = mcvae.uniform(log_alpha, generator) < log_alpha.exp()
        moved = mcvae.select(accepted, new, old)
        return mcvae.Transition(
            mcvae.State(moved),
            # as for every reversible kernel
            log_ratio=bridge.log_density(old, step.beta) - bridge.log_density(moved, step.beta),
            log_accept=torch.where(accepted, log_alpha, torch.log1p(-log_alpha.exp())),
            acceptance=log_alpha.exp(),
        )


def main() -> None:
    """Use it on a posterior of known evidence, beside random-walk Metropolis."""
    generator = torch.Generator().manual_seed(0)
    dim, sigma = 50, 2.0
    x = torch.randn(dim, generator=generator)
    exact = Normal(0.0, (1 + sigma**2) ** 0.5).log_prob(x).sum().item()
    prior = Independent(Normal(torch.zeros(1, dim), torch.ones(1, dim)), 1)

    def log_joint(z: Tensor) -> Tensor:
        return Normal(0.0, 1.0).log_prob(z).sum(-1) + Normal(z, sigma).log_prob(x).sum(-1)

    print(f"exact log evidence {exact:.3f}, {dim} dimensions")
    for name, kernel in {"Crank–Nicolson": CrankNicolson(), "random walk": mcvae.rwm()}.items():
        e = mcvae.estimate_log_evidence(
            log_joint, prior, kernel=kernel, num_steps=40, num_samples=128, step_size=0.5, generator=generator
        )
        ours, error = e.log_evidence.item(), e.standard_error.item()
        print(
            f"{name:<15} {ours:.3f} ± {error:.3f}, acceptance {e.acceptance.item():.2f}, ESS {e.ess.item():.0f} of 128"
        )
        assert abs(ours - exact) < 5 * error


if __name__ == "__main__":
    main()
