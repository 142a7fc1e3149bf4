"""Measures the memory of each process that helps to find the potential of a global map.

The bank is mapped from a file, which the processes share. Their own memory is counted, and their
potentials are compared bit for bit. The time is not: processes of one machine share its cores.

    python benchmarks/several_processes.py --size 11584 --dim 128
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import output
import torch
from output import Record
from whole_bank import synthetic_bank

from otad.cip.whole_bank.potential import least_bank_smoothness
from otad.processes import Processes, group_of

COUNTS = (1, 2)
EVERY = 0.005  # seconds between two looks at the memory


def own_memory() -> int:
    """Return the bytes of this process that are not mapped from a file."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in status if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


class Peak:
    """The growth of the process's own memory within the context, in bytes."""

    def __enter__(self) -> Peak:
        self.growth, self.before, self.done = 0, own_memory(), threading.Event()
        self.watch = threading.Thread(target=self._watch)
        self.watch.start()
        return self

    def _watch(self) -> None:
        while not self.done.wait(EVERY):
            self.growth = max(self.growth, own_memory() - self.before)

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.watch.join()


def mapped(path: Path, size: int, dim: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=False, size=size * dim).view(size, dim)


def work(folder: Path, size: int, dim: int) -> None:
    """Find the potential in this process, and write what it took."""
    torch.set_num_threads(1)
    bank = [mapped(folder / name, size, dim) for name in ("inputs", "features")]
    with group_of("cpu"):
        processes = Processes.joined("cpu")
        least_bank_smoothness(*(part[:64].clone() for part in bank))  # one-time costs
        with Peak() as peak:
            found = least_bank_smoothness(*bank)
        levels = hashlib.sha256(found.levels.numpy().tobytes()).hexdigest()
        about = {"memory": peak.growth, "smoothness": found.smoothness, "sweeps": found.sweeps}
        text = json.dumps(about | {"levels": levels})
        (folder / f"{processes.count}-{processes.rank}.json").write_text(text, encoding="utf-8")


def run(size: int, dim: int, seed: int, counts: tuple[int, ...] = COUNTS) -> Record:
    """Find the potential of one bank with each number of processes."""
    where = output.environment(torch.device("cpu"), threads=1)
    start, runs = time.perf_counter(), []
    with TemporaryDirectory() as place:
        folder = Path(place)
        inputs, features, _ = synthetic_bank(size, dim, 1, seed=seed)
        (folder / "inputs").write_bytes(inputs.numpy().tobytes())
        (folder / "features").write_bytes(features.numpy().tobytes())
        for count in counts:
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
            worker = [__file__, "--worker", place, "--size", str(size), "--dim", str(dim)]
            subprocess.run([sys.executable, *launch, *worker], check=True)
            files = [folder / f"{count}-{rank}.json" for rank in range(count)]
            runs.append([json.loads(path.read_text(encoding="utf-8")) for path in files])
    first = runs[0][0]
    same = ("levels", "smoothness", "sweeps")
    return {
        "benchmark": "several processes",
        "size": size,
        "dim": dim,
        "seed": seed,
        "environment": where,
        "seconds": time.perf_counter() - start,
        "bank_bytes": 2 * 4 * size * dim,
        "equal": all(one[name] == first[name] for some in runs for one in some for name in same),
        "memory": {str(len(some)): [one["memory"] for one in some] for some in runs},
    }


def main(arguments: list[str] | None = None) -> None:
    parser = output.parser_of(__doc__)
    parser.add_argument("--size", type=int, default=11_584, help="Points of the bank.")
    parser.add_argument("--dim", type=int, default=128, help="Dimension of the pairs.")
    parser.add_argument("--worker", type=Path, help="Used by the processes that are started.")
    given = parser.parse_args(arguments)
    if min(given.size, given.dim) < 1:
        parser.error("size, dim: expected positive numbers")
    if given.worker is not None:
        return work(given.worker, given.size, given.dim)
    record = run(given.size, given.dim, given.seed)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "several-processes.json"
    text = json.dumps({"format": 1} | record, indent=1, allow_nan=False) + "\n"
    path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"equal: {record['equal']}\n{record['memory']}\nwrote {path}\n")


if __name__ == "__main__":
    main()
