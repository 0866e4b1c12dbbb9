"""Counts like those of genes in single cells, written to counts.npz: `python examples/simulate_counts.py`.

5 types of cells, 4 programmes of genes that vary within a type, library sizes over one order of magnitude, and negative
binomial counts with a dispersion for every gene: 3,000 cells, 100 genes, seven of ten counts 0.
"""

import numpy as np

CELLS, GENES, TYPES, PROGRAMMES = {"train": 2000, "validation": 500, "test": 500}, 100, 5, 4


def simulate(seed: int = 0) -> dict[str, np.ndarray]:
    """Counts of every split, `[cells, genes]`."""
    random = np.random.default_rng(seed)
    base = random.normal(-1.5, 1.0, GENES)  # log mean of a gene
    markers = random.normal(0, 1.0, (TYPES, GENES)) * (random.random((TYPES, GENES)) < 0.2)  # a fifth of the genes
    loadings = random.normal(0, 0.4, (PROGRAMMES, GENES))
    dispersion = random.uniform(0.5, 5.0, GENES)  # r: the variance is mean + mean² / r
    found = {}
    for split, cells in CELLS.items():
        kind, activity = random.integers(0, TYPES, cells), random.normal(0, 1, (cells, PROGRAMMES))
        library = random.normal(0, 0.6, (cells, 1))
        mean = np.exp(base + markers[kind] + activity @ loadings + library)
        found[split] = random.poisson(random.gamma(dispersion, mean / dispersion)).astype(np.int64)
    return found


if __name__ == "__main__":
    counts = simulate()
    np.savez_compressed("counts.npz", **counts)
    print(f"counts.npz: {', '.join(f'{name} {list(array.shape)}' for name, array in counts.items())}, ", end="")
    print(f"{100 * (counts['train'] == 0).mean():.0f} % zeros, mean {counts['train'].mean():.2f}")
