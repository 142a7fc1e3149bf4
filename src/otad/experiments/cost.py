"""What predictions cost, in time and memory, as the bank grows: one fresh process per size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from otad.errors import InputError, OtadError
from otad.experiments.nets import Trained
from otad.experiments.records import CostRecord
from otad.experiments.specs import CostSpec
from otad.experiments.study import Study
from otad.model.defend import defend


def measure_costs(study: Study, spec: CostSpec) -> tuple[tuple[CostRecord, ...], dict[str, str]]:
    """A record for each device and bank, and why devices are missing."""
    trained = study.net(spec.net)
    available = len(trained.data.train_x)
    if max(spec.banks) > available:
        raise InputError(
            f"cost.banks: expected at most the {available} points of the train part, "
            f"got {max(spec.banks)}"
        )
    records, missing = [], {}
    for device in spec.devices:
        if device == "cuda" and not torch.cuda.is_available():
            missing[device] = "no CUDA device on this machine"
            continue
        for bank in spec.banks:
            label = f"{spec.queries} predictions, bank of {bank}, {device}"
            identity = trained.identity | {"cost": [device, bank, spec.queries, spec.batch_size]}
            record = study.part(
                label,
                CostRecord,
                identity | {"threads": spec.threads},
                partial(_measure, study, trained, spec, device, bank, label),
            )
            study.seconds[label] = record.seconds
            records.append(record)
    return tuple(records), missing


def _measure(
    study: Study, trained: Trained, spec: CostSpec, device: str, bank: int, label: str
) -> CostRecord:
    study.report(label, 0, 1)
    data = trained.data
    generator = torch.Generator().manual_seed(study.seed)
    rows = torch.randperm(len(data.train_x), generator=generator)[:bank].sort().values
    with tempfile.TemporaryDirectory(prefix="otad-cost-") as folder:
        model, queries = Path(folder) / "model", Path(folder) / "queries.safetensors"
        defend(trained.net, data.train_x[rows], data.train_y[rows]).save(model)
        chosen = slice(0, spec.queries)
        save_file({"x": data.test_x[chosen], "y": data.test_y[chosen]}, queries)
        found = run_probe(
            "otad.experiments.probe",
            [str(model), str(queries)],
            device=device,
            threads=spec.threads,
            batch_size=spec.batch_size,
        )
    study.report(label, 1, 1)
    return CostRecord(
        device=device,
        bank=bank,
        queries=min(spec.queries, len(data.test_x)),
        batch_size=spec.batch_size,
        threads=spec.threads,
        **found,
    )


def run_probe(
    module: str, arguments: Sequence[str], *, device: str, threads: int, batch_size: int
) -> dict[str, Any]:
    """What a module that measures a model in a process of its own says, in one line of JSON."""
    command = [sys.executable, "-m", module, *arguments]
    command += ["--device", device, "--threads", str(threads), "--batch-size", str(batch_size)]
    limits = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)
    )
    source = str(Path(__file__).parents[2])  # the very package that runs here
    paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    environment = os.environ | limits | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise OtadError(f"the process that measures the cost failed:\n{done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
