"""What a query costs the models of some rows: one fresh process for each, and place of the bank."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from otad.experiments.cost import run_probe
from otad.experiments.learned_records import SpeedRecord
from otad.experiments.specs import SpeedSpec
from otad.experiments.steps import STEPS
from otad.experiments.study import Study
from otad.model.bank import FeatureBank
from otad.model.otad import OTAD

_FEW = 16  # points of a bank that nobody asks


def measure_speeds(study: Study, spec: SpeedSpec) -> tuple[SpeedRecord, ...]:
    """Row by row; a net alone has no bank, and so no place of it."""
    found = []
    for key in spec.rows:
        is_net = study.experiment.rows[key].method == "net"
        with tempfile.TemporaryDirectory(prefix="otad-speed-") as folder:
            for place in (None,) if is_net else spec.places:
                label = f"speed of {key}" + ("" if place is None else f", bank in {place}")
                steps = list(STEPS) if spec.steps else None
                asked = [spec.queries, spec.batch_size, spec.threads, steps, place]
                record = study.part(
                    label,
                    SpeedRecord,
                    study.identity(key) | {"speed": asked},
                    partial(_measure, study, spec, key, place, label, Path(folder)),
                )
                found.append(replace(record, row=key))  # it may have had another name
    return tuple(found)


def _measure(
    study: Study, spec: SpeedSpec, key: str, place: str | None, label: str, folder: Path
) -> SpeedRecord:
    study.report(label, 0, 1)
    row = study.experiment.rows[key]
    data = study.net(row.net).data
    model = _few_points(study.bank(row.net)) if place is None else study.defended(key)
    where, queries = folder / "model", folder / "queries.safetensors"
    if not where.exists():  # written for the place before
        model.save(where)
        chosen = slice(0, spec.queries)
        save_file({"x": data.test_x[chosen].clone(), "y": data.test_y[chosen].clone()}, queries)
    flags = {"--net": place is None, "--disk": place == "disk", "--steps": spec.steps}
    found: dict[str, Any] = run_probe(
        "otad.experiments.speed_probe",
        [str(where), str(queries), *(flag for flag, is_on in flags.items() if is_on)],
        device=study.device,
        threads=spec.threads,
        batch_size=spec.batch_size,
    )
    study.report(label, 1, 1)
    return SpeedRecord(
        row=key,
        place=place,
        device=study.device,
        bank=0 if place is None else len(model.bank_inputs),
        queries=min(spec.queries, len(data.test_x)),
        batch_size=spec.batch_size,
        threads=spec.threads,
        **found,
    )


def _few_points(base: OTAD) -> OTAD:
    """A model of which the net alone will be asked."""
    bank = base.bank
    inputs, features, labels = (
        part[:_FEW].clone() for part in (bank.inputs, bank.features, bank.labels)
    )
    few = FeatureBank(inputs, features, labels, bank.fingerprint)
    return base.replace(bank=few, n_neighbors=1, resident=True)
