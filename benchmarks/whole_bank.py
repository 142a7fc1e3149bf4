"""Times the global map through N points as N grows.

For nested subsets of one bank it finds the potential of least L, and then maps the same queries.

    python benchmarks/whole_bank.py --sizes 500,1000 --queries 200 --dim 64
    python benchmarks/whole_bank.py --net mnist-net --device cuda
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import output
import torch
from matplotlib.figure import Figure
from output import Record
from timing import limited_threads, timed
from torch import Tensor

from otad.cip.whole_bank.map import WholeBank
from otad.cip.whole_bank.potential import least_bank_smoothness
from otad.io.environment import resident_now, resident_peak

SIZES = "1000,2000,5000,10000,20000,60000"
Bank = tuple[Tensor, Tensor, Tensor]
"""The inputs and features (N,d) of a bank in random order, and queries (B,d)."""


def synthetic_bank(size: int, dim: int, queries: int, *, seed: int) -> Bank:
    """Draw points near 10 centers on a subspace of few dimensions, with features.

    Features are the gradient of a convex function, z = (x + C^T softmax(C x)) / 2 with random C,
    plus a little noise."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    low = min(dim, 30)
    basis, centers = normal(low, dim) / math.sqrt(low), 2 * normal(10, low)
    corners = normal(10, dim) / math.sqrt(dim)

    def draw(count: int) -> Tensor:
        place = centers[torch.randint(10, (count,), generator=generator)] + normal(count, low)
        return (place @ basis + 0.1 * normal(count, dim)) / math.sqrt(dim / low)

    points = draw(size)
    features = (points + torch.softmax(points @ corners.T, 1) @ corners) / 2
    return points, features + 0.01 * normal(size, dim) / math.sqrt(dim), draw(queries)


@torch.no_grad()
def bank_of_net(
    folder: Path, data_dir: Path | None, size: int, queries: int, *, seed: int, device: str
) -> tuple[Bank, str]:
    """Return the bank of a network's training data in random order, with test data as queries.

    The second result is the name of the data."""
    from otad.cli.sources import TrainedNet

    trained = TrainedNet.read(folder)
    dataset = trained.note.choice.load(data_dir)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(dataset.train_x), generator=generator)[:size]
    net = trained.net.to(device)
    inputs, asked = (
        torch.cat([net.embed(part.to(device)) for part in x.split(1000)])
        for x in (dataset.train_x[order], dataset.test_x[:queries])
    )
    features = torch.cat([net.transport(part)[0] for part in inputs.split(1000)])
    return (inputs, features, asked), trained.about["data"]["name"]


def run(
    bank: Bank,
    sizes: Sequence[int],
    *,
    source: str = "synthetic",
    device: str = "cpu",
    threads: int = 2,
    budget: float = math.inf,
    pricing: str = "exact",
    seed: int = 0,
) -> Record:
    """Measure every size in ascending order. Sizes beyond the data become one, all of the data.

    A size whose potential is expected to take longer than `budget` seconds is left out. All pairs
    are used, so the time grows with the square of N.
    """
    target = torch.device(device)
    where, start = output.environment(target, threads), time.perf_counter()
    measured: list[Record] = []
    left_out: dict[str, str] = {}
    wanted = sorted({min(size, len(bank[0])) for size in sizes})
    with limited_threads(threads):
        _measure(tuple(part[:64] for part in bank), target, pricing)  # one-time costs
        for size in output.steps(wanted, "global map benchmark"):
            last = measured[-1] if measured else {"potential_seconds": 0.0, "size": 1}
            seconds = last["potential_seconds"] * (size / last["size"]) ** 2
            if seconds > budget:
                left_out[str(size)] = f"expected to take {seconds:.0f} s, over {budget:.0f} s"
            else:
                few = (bank[0][:size], bank[1][:size], bank[2])
                measured.append(_measure(few, target, pricing))
    return {
        "benchmark": "global",
        "source": source,
        "pricing": pricing,
        "dim": bank[0].shape[1],
        "seed": seed,
        "environment": where,
        "seconds": time.perf_counter() - start,
        "left_out": left_out,
        "sizes": measured,
    }


def _measure(bank: Sequence[Tensor], device: torch.device, pricing: str) -> Record:
    """Measure one bank.

    Seconds are totals, not per query. `gap` is the largest of all queries, `rounds` and `support`
    are means, and `unsolved` counts the queries whose gap did not close."""
    inputs, features, queries = (part.to(device) for part in bank)
    sweeps: list[float] = []
    memory = _Memory(device)
    potential, potential_seconds = timed(
        lambda: least_bank_smoothness(
            inputs, features, progress=lambda _, rise: sweeps.append(rise)
        ),
        device,
    )
    potential_memory, memory = memory.peak(), _Memory(device)
    made, making_seconds = timed(
        lambda: WholeBank(inputs, features, potential, pricing=pricing), device
    )
    with torch.no_grad():
        found, query_seconds = timed(lambda: made(queries), device)
        _, product_seconds = timed(
            lambda: [some @ inputs.mT for some in queries.split(256)], device
        )
    support = (found.solution.multipliers > 0).sum(1).double()
    return {
        "size": len(inputs),
        "queries": len(queries),
        "smoothness": potential.smoothness,
        "sweeps": len(sweeps),
        "violation": potential.violation,
        "potential_seconds": potential_seconds,
        "making_seconds": making_seconds,
        "query_seconds": query_seconds,
        "product_seconds": product_seconds,
        "rounds": float(found.rounds.double().mean()),
        "most_rounds": int(found.rounds.max()),
        "support": float(support.mean()),
        "most_support": int(support.max()),
        "gap": float(found.gap.max()),
        "unsolved": int((found.solution.status != 0).sum()),
        "potential_memory": potential_memory,
        "query_memory": memory.peak(),
    }


class _Memory:
    """The peak of memory in bytes since it was made, of the GPU or of the process.

    On a GPU it counts what was added. The peak of a process never falls, so on the CPU a smaller
    step after a larger one shows 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated() if self.cuda else resident_now()

    def peak(self) -> int:
        now = torch.cuda.max_memory_allocated() if self.cuda else resident_peak()
        return max(0, now - self.before)


NOTES = """\
potential  The time to find the potential of least L, by `sweeps` over all pairs.
total      The time for all queries; `rounds` is how often every point was priced.
product    The time of the bare products of all queries and points, for comparison.
gap        The largest gap, over all points in float64: |z' - exact|^2 <= M gap.
memory     The peak beyond the bank on a GPU, or the growth of the process on a CPU."""


def cells(row: Record) -> dict[str, str]:
    memory = max(row["potential_memory"], row["query_memory"]) / 2**30
    product = row.get("product_seconds")  # older records lack it
    return {
        "N": f"{row['size']:,}",
        "least L": f"{row['smoothness']:.4g}",
        "potential": output.format_seconds(row["potential_seconds"]),
        "sweeps": str(row["sweeps"]),
        "queries": f"{row['queries']:,}",
        "total": output.format_seconds(row["query_seconds"]),
        "product": "-" if product is None else output.format_seconds(product),
        "rounds": f"{row['rounds']:.2f}",
        "support": f"{row['support']:.1f}",
        "gap": f"{row['gap']:.0e}" + (f" ({row['unsolved']} open)" if row["unsolved"] else ""),
        "memory": f"{memory:.2f} GiB",
    }


def draw(record: Record) -> Figure:
    """Draw seconds against N."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    panel = figure.subplots()
    sizes = [row["size"] for row in record["sizes"]]
    for name, style in (("potential", "s-"), ("query", "o-")):
        panel.plot(sizes, [row[f"{name}_seconds"] for row in record["sizes"]], style, label=name)
    output.log_axes(panel, sizes, f"points of the bank, N (d = {record['dim']:,})")
    panel.legend(frameon=False)
    figure.suptitle(f"Global map on {record['environment']['device_name']}")
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = output.parser_of(__doc__)
    parser.add_argument("--net", type=Path, help="Folder of otad train, to use its data.")
    parser.add_argument("--data-dir", type=Path, help="Folder of the registered data sets.")
    parser.add_argument("--sizes", default=SIZES, help="Bank sizes N, as far as the data go.")
    parser.add_argument("--queries", type=int, default=10_000, help="The most queries.")
    parser.add_argument("--dim", type=int, default=784, help="Dimension of the synthetic pairs.")
    parser.add_argument("--pricing", choices=("exact", "faiss"), default="exact")
    skipped = "Skip sizes whose potential is expected to take more seconds."
    parser.add_argument("--budget", type=float, default=600.0, help=skipped)
    given = output.checked(parser, arguments)
    sizes = [int(part) for part in given.sizes.split(",")]
    largest, source = max(sizes), "synthetic"
    if min(*sizes, given.queries, given.dim) < 1:
        parser.error("sizes, queries, dim: expected positive numbers")
    if given.net is None:
        bank = synthetic_bank(largest, given.dim, given.queries, seed=given.seed)
    else:
        how = {"seed": given.seed, "device": given.device}
        bank, source = bank_of_net(given.net, given.data_dir, largest, given.queries, **how)
    how = {
        name: getattr(given, name) for name in ("device", "threads", "budget", "pricing", "seed")
    }
    record = run(bank, sizes, source=source, **how)
    title = f"Global map through N points ({source}, d = {record['dim']:,})"
    missing = (f"N = {size}: {reason}" for size, reason in record["left_out"].items())
    kind = "" if given.pricing == "exact" else f"-{given.pricing}"
    stem = given.out / f"global-{source}-{given.device}{kind}"
    shown = (output.table(title, map(cells, record["sizes"])), *missing, NOTES)
    output.finish(record, shown, draw(record), stem)


if __name__ == "__main__":
    main()
