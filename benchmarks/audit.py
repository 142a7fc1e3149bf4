"""Searches for errors of certificates and of the attack suite, without using `otad.attacks`.

    python benchmarks/audit.py certificates --workers 16
    python benchmarks/audit.py certificates --only 17        # repeats one case
    python benchmarks/audit.py suite --device cuda --data-dir data

"certificates" makes small models of all kinds on unusual banks and certifies queries. Then it looks
for inputs within each radius (in regression, within eps) that change the answer: in random and axis
directions, towards bank points, across bisectors, and by gradient ascent. Lines that continue
beyond the radius show how tight it is. "suite" attacks a model on MNIST by the standard suite and
by an independent attack. Both write a JSON record, and exit with 1 if they find a contradiction.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import shlex
import statistics
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from odd_models import BANKS, SETTINGS, attention_ratios, make_case
from own_search import OwnAttack, Search, SuiteSize

import otad
from otad.certify import certify, certify_values
from otad.data.splits import subset_per_class
from otad.io.codec import write_json
from otad.io.environment import Environment
from otad.progress import bars
from otad.training import fit_backbone, recipe

TINY_SUITE = SuiteSize("digits", 20, 6, 0.8, 10, ("straight", "noise"), 1, 4, (3,))


def run_case(number: int, seed: int, queries: int) -> dict[str, Any]:
    """Audit one model and return, for every certified query, its rule, radius and nearest change.

    `inputs` counts the inputs that were tried within the radius."""
    pairs = list(itertools.product(BANKS, SETTINGS))
    random.Random(f"{seed}, {number // len(pairs)}").shuffle(pairs)
    bank, setting = pairs[number % len(pairs)]
    found: dict[str, Any] = {"case": number, "bank": bank, "setting": setting, "rows": []}
    drawn = torch.Generator().manual_seed(1_000_003 * seed + number)
    if setting == "attention":
        bound, ratios = attention_ratios(bank, drawn, queries)
        nearest = bound / max(float(ratios.max()), 1e-300)
        row = {"row": 0, "rule": setting, "radius": 1.0, "inputs": len(ratios), "nearest": nearest}
        return found | {"queries": 1, "rows": [row]}
    try:
        case = make_case(bank, setting, drawn, queries)
        inputs = case.x.view(-1, *case.model.backbone.input_shape)
        if case.model.backbone.task == "regression":
            eps = case.spread * (0.03, 0.3, 1.0)[number % 3]
            interval = certify_values(case.model, inputs, eps, **case.options)
            limit, sign = torch.cat([interval.high, -interval.low]), torch.ones(2 * len(inputs))
            sign[len(inputs) :] = -1
            radius = torch.where(limit.isfinite(), torch.full_like(limit, eps), 0.0)
            rules = [f"values, {case.model.scope}"] * len(limit)
            case = case._replace(x=case.x.repeat(2, 1))
        else:
            proof = certify(case.model, inputs, **case.options)
            radius, limit, rules, sign = proof.radius, proof.prediction, list(proof.rules), None
    except otad.OtadError as error:
        return found | {"queries": 0, "refused": str(error)}
    proved = (radius > 0).nonzero()[:, 0]
    found["queries"] = len(radius)
    if len(proved) == 0:
        return found
    case = case._replace(x=case.x[proved])
    search = Search(case, radius[proved], limit[proved], None if sign is None else sign[proved])
    search.run(case, drawn)
    columns = proved.tolist(), radius[proved].tolist(), search.inside.tolist(), search.nearest
    for row, size, inside, nearest in zip(*columns[:3], columns[3].tolist(), strict=True):
        about = {"row": row, "rule": rules[row], "radius": size, "inputs": inside}
        found["rows"].append(about | {"nearest": nearest})
    return found | {"uncovered": search.uncovered}


def summary(cases: list[dict[str, Any]], command: str) -> dict[str, Any]:
    """Return counts by rule, bank and setting.

    `nearest_change` is the least distance at which an answer was seen to change, as a multiple of
    the radius, or None if none was; `median_change` is the median of those seen."""
    tables: dict[str, Any] = {key: defaultdict(list) for key in ("rule", "bank", "setting")}
    violations, refused = [], Counter[str]()
    for case in cases:
        if "refused" in case:
            refused[f"{case['setting']}: {case['refused'].split(':')[0][:80]}"] += 1
        for row in case["rows"]:
            infinite = math.isinf(row["radius"])
            ratio = row["nearest"] / row["radius"] if not infinite else math.inf
            wrong = row["nearest"] < row["radius"] * (1 - 1e-12)
            for key, table in tables.items():
                table[case.get(key, row["rule"])].append((row["inputs"], ratio, wrong))
            if wrong:
                about = {name: case[name] for name in ("case", "bank", "setting")} | row
                about["radius"] = "inf" if infinite else row["radius"]
                violations.append(about | {"repeat": f"{command} --only {case['case']}"})

    def tally(rows: list[tuple[int, float, bool]]) -> dict[str, Any]:
        ratios = [ratio for _, ratio, _ in rows if math.isfinite(ratio)]
        return {
            "certified": len(rows),
            "inputs": sum(inputs for inputs, _, _ in rows),
            "violations": sum(wrong for _, _, wrong in rows),
            "nearest_change": min(ratios, default=None),
            "median_change": statistics.median(ratios) if ratios else None,
        }

    every = [row for rows in tables["rule"].values() for row in rows]
    return {
        "models": sum("refused" not in case for case in cases),
        "queries": sum(case["queries"] for case in cases),
        **tally(every),
        "unsolved_changes": sum(case.get("uncovered", 0) for case in cases),
        "refused": dict(sorted(refused.items())),
        **{f"by_{key}": {name: tally(table[name]) for name in sorted(table)}
           for key, table in tables.items()},
        "found": violations,
    }  # fmt: skip


def audit_certificates(given: argparse.Namespace, command: str) -> dict[str, Any]:
    count, queries = (10, 5) if given.preset == "tiny" else (given.cases, 32)
    numbers = range(count) if given.only is None else [given.only]
    work = partial(run_case, seed=given.seed, queries=queries)
    with bars() as lines:
        task = lines.add_task("cases", total=len(numbers))
        done = []
        if given.workers == 1:
            found = map(work, numbers)
        else:
            one = partial(torch.set_num_threads, 1)
            how = {"mp_context": get_context("spawn"), "initializer": one}
            pool = ProcessPoolExecutor(given.workers, **how)
            found = pool.map(work, numbers)
        for case in found:
            done.append(case)
            lines.advance(task)
    return {"queries_per_model": queries, "workers": given.workers} | summary(done, command)


def audit_suite(given: argparse.Namespace) -> dict[str, Any]:
    size, device = TINY_SUITE if given.preset == "tiny" else SuiteSize(), given.device
    data = otad.data.load(size.data, given.data_dir)
    drawn = torch.Generator().manual_seed(given.seed)
    rows = subset_per_class(data.train_y, size.per_class, drawn)
    train_x, train_y = data.train_x[rows], data.train_y[rows]
    chosen = torch.randperm(len(data.test_x), generator=drawn)[: size.points]
    x, y = data.test_x[chosen].to(device), data.test_y[chosen].to(device)
    config = recipe("fc", epochs=size.epochs, seed=given.seed, device=device)
    sizes: dict[str, Any] = {"n_outputs": len(data.classes), "bounds": data.bounds}
    net, trained = fit_backbone((train_x, train_y), config, progress=True, **sizes)
    train_x, train_y = train_x.to(device), train_y.to(device)
    model = otad.defend(net.to(device), train_x, train_y)
    threat = otad.L2(size.eps)
    with bars() as lines:
        task = lines.add_task("suite")

        def show(label: str, done: int, total: int, worst: float) -> None:
            lines.update(task, description=label, completed=done, total=total)

        options: dict[str, Any] = {"attacks": size.attacks, "seed": given.seed, "progress": show}
        suite = otad.evaluate(model, x, y, threat, flags=False, undefended=False, **options)
    started = time.perf_counter()
    attack = OwnAttack(model, x, y, size, given.seed)
    counts = attack.run(train_x, train_y)
    own, theirs = attack.distance.tolist(), suite.distances()
    broken = [(a <= size.eps, b <= size.eps) for a, b in zip(own, theirs, strict=True)]
    proof = suite.certificate
    radius = proof.radius if proof is not None else [0.0] * len(x)
    found = [
        {"row": int(chosen[row]), "radius": radius[row], "distance": own[row]}
        for row in range(len(x))
        if own[row] < radius[row] and row in suite.clean_right
    ]
    return {
        "config": asdict(size), "bank": len(train_x), "train_score": trained.final.train_score,
        "clean": {name: score.value for name, score in suite.clean.items()},
        "left_by_suite": sum(not b for _, b in broken),
        "left_by_own": sum(not a for a, _ in broken),
        "left_by_both": sum(not a and not b for a, b in broken),
        "only_own": [int(chosen[row]) for row, (a, b) in enumerate(broken) if a and not b],
        "only_suite": [int(chosen[row]) for row, (a, b) in enumerate(broken) if b and not a],
        "own_parts": counts, "own_seconds": time.perf_counter() - started,
        "per_attack": suite.per_attack, "missing": suite.missing, "suite_seconds": suite.seconds,
        "found": found,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    about = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**about)
    parser.add_argument("part", choices=("certificates", "suite"))
    parser.add_argument("--preset", choices=("full", "tiny"), default="full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2 * len(BANKS) * len(SETTINGS))
    parser.add_argument("--only", type=int, help="The number of one case of the certificates.")
    parser.add_argument("--workers", type=int, default=1, help="Processes for the certificates.")
    device = {"choices": ("cpu", "cuda"), "default": "cpu", "help": "Where the suite runs."}
    parser.add_argument("--device", **device)
    parser.add_argument("--data-dir", type=Path, help="Folder of the registered data sets.")
    where = "Folder of the record."
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"), help=where)
    given = parser.parse_args(arguments)
    for name in ("cases", "workers"):
        if getattr(given, name) < 1:
            parser.error(f"{name}: expected at least 1, got {getattr(given, name)}")
    shown = sys.argv[1:] if arguments is None else arguments
    started, device = time.perf_counter(), torch.device(given.device)
    command = shlex.join(["python", "benchmarks/audit.py", *shown])
    base = f"python benchmarks/audit.py certificates --preset {given.preset} --seed {given.seed}"
    is_suite = given.part == "suite"
    record = audit_suite(given) if is_suite else audit_certificates(given, base)
    head = {"format": 1, "benchmark": f"audit-{given.part}", "command": command, "seed": given.seed}
    where = asdict(Environment.now(device, torch.get_num_threads()))
    record = head | {"environment": where, "seconds": time.perf_counter() - started} | record
    if given.only is None:
        given.out.mkdir(parents=True, exist_ok=True)
        tail = "" if given.preset == "full" else f"-{given.preset}"
        tail += f"-seed{given.seed}" if given.seed else ""
        write_json(given.out / f"audit-{given.part}{tail}.json", record)
    weaker = is_suite and record["left_by_suite"] > record["left_by_own"]
    names = (
        ("left_by_suite", "left_by_own", "left_by_both", "only_own")
        if is_suite
        else ("models", "queries", "certified", "inputs", "violations", "nearest_change")
    )
    for name in (*names, "found"):
        sys.stdout.write(f"{name}: {record[name]}\n")
    return int(bool(record["found"]) or weaker)


if __name__ == "__main__":
    sys.exit(main())
