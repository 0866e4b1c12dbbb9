"""The log evidence of a density of your own: how wrong is the ELBO, how wrong is IWAE, what does annealing give?

The paper's toy model: z ~ N(0, I_2), x | z ~ N(ξ(‖z‖ + ζ), σ²). Its posterior is a ring, a Gaussian q cannot follow it,
and quadrature knows the exact answer.
"""

import torch
from torch.distributions import Independent, Normal

import mcvae


def main() -> None:
    """Compare bounds with longer and longer chains, then let the pilot decide everything."""
    generator = torch.Generator().manual_seed(0)
    ring = mcvae.models.Ring(xi=1.0, zeta=0.0, sigma=0.1, latent_dim=2)
    x = torch.full((200, 1), 1.5)  # 200 copies of one datum: independent replicates
    exact = ring.log_evidence(x[:1]).item()
    q = Independent(Normal(torch.zeros(200, 2), torch.full((200, 2), 1.1)), 1)
    bridge = mcvae.LatentVariableModel(lambda x: q, ring).bridge(x)
    methods = {
        "VAE": mcvae.recipes.vae(),
        "IWAE, 10 samples": mcvae.recipes.iwae(10),
        "L-MCVAE, K = 5": mcvae.recipes.l_mcvae(5),
        "L-MCVAE, K = 20": mcvae.recipes.l_mcvae(20),
        "A-MCVAE, K = 20": mcvae.recipes.a_mcvae(20),
    }
    print(f"A ring, one datum, exact log p(x) = {exact:.3f}\n")
    print(f"{'method':<18}{'bound':>9}{'± s.e.':>9}{'gap':>9}{'evaluations':>13}")
    for name, objective in methods.items():
        with torch.no_grad():
            for _ in range(30):  # adapt step sizes first; they stay frozen below
                objective.adapt(objective(bridge, generator=generator))
            bounds = torch.cat([objective(bridge, generator=generator).bound for _ in range(10)])
        mean, error = bounds.mean().item(), (bounds.std() / len(bounds) ** 0.5).item()
        evaluations = objective.num_samples * (objective.schedule.num_steps + 1)
        print(f"{name:<18}{mean:>9.3f}{error:>9.3f}{exact - mean:>9.3f}{evaluations:>13}")

    def log_joint(z: torch.Tensor) -> torch.Tensor:
        """Any function `[S, B, D] -> [S, B]` will do."""
        log_prior = Normal(0.0, 1.0).log_prob(z).sum(-1)
        return log_prior + Normal(z.norm(dim=-1), 0.1).log_prob(torch.tensor(1.5))

    one = Independent(Normal(torch.zeros(1, 2), torch.full((1, 2), 1.1)), 1)
    e = mcvae.estimate_log_evidence(log_joint, one, generator=generator)
    print(f"\nestimate_log_evidence: {e.log_evidence.item():.3f} ± {e.standard_error.item():.3f}, {e.verdict()}")


if __name__ == "__main__":
    main()
