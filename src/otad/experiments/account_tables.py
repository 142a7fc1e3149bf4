"""Tables of how the answers were come by: the solver's account, time and memory."""

from __future__ import annotations

from otad.experiments import cells
from otad.experiments.cells import GIGABYTE, NONE, table
from otad.experiments.records import RowRecord, RunRecord
from otad.experiments.score_tables import mean_error


def accounts(record: RunRecord) -> str:
    head = ["how OTAD answered", "mode", "L used: least / median / 90 % / 99 % / most", "solved %"]
    head += ["raised %", "nearest alone %", "residual", "relative error", "changed by potential %"]
    head += ["local Lipschitz: median / most"]
    body = []
    for row in record.rows.values():
        account = row.account
        if account is None and row.lipschitz is None:
            continue
        lipschitz = NONE
        if row.lipschitz is not None:
            lipschitz = f"{row.lipschitz.median:.2f} / {row.lipschitz.most:.2f}"
            if "lipschitz" in row.published:
                lipschitz += f" (published {row.published['lipschitz']:g})"
        if account is None:
            body.append([row.label, *[NONE] * 8, lipschitz])
            continue
        shares = account.statuses
        changed = account.changed_by_potential
        body.append(
            [
                row.label,
                _mode(row),
                cells.spread(account.smoothness),
                cells.percent(shares["solved"]),
                cells.percent(shares["raised"]),
                cells.percent(shares["infeasible"] + shares["unsolved"]),
                NONE if account.residual is None else f"{account.residual:.1e}",
                mean_error(row),
                NONE if changed is None else cells.percent(changed),
                lipschitz,
            ]
        )
    return table(head, body)


def potentials(record: RunRecord) -> str:
    head = ["one map for the bank", "L", "l", "points left out", "sweeps"]
    head += ["largest violation of a pair", "seconds"]
    body = []
    for row in record.rows.values():
        if (found := row.potential) is not None:
            line = [row.label, f"{found.smoothness:.5g}", f"{found.strong_convexity:.5g}"]
            line += [f"{len(found.left_out):,}", str(found.sweeps), f"{found.violation:.1e}"]
            body.append([*line, f"{found.seconds:.1f}"])
    return table(head, body)


def costs(record: RunRecord) -> str:
    head = ["device", "threads", "bank", "predictions", "seconds", "resident GB", "on device GB"]
    head += ["accuracy %", "asked for", "met"]
    asked = record.config["cost"]
    seconds, memory = asked.get("seconds_at_most"), asked.get("gigabytes_at_most")
    largest = max(cost.bank for cost in record.costs)
    body = []
    for cost in record.costs:
        resident = cost.resident / GIGABYTE
        on_device = None if cost.device_memory is None else cost.device_memory / GIGABYTE
        wanted, is_met = NONE, None
        if cost.bank == largest and seconds is not None and memory is not None:
            wanted = f"at most {seconds:g} s and {memory:g} GB"
            is_met = cost.seconds <= seconds and resident <= memory
        body.append(
            [
                cost.device,
                str(cost.threads),
                f"{cost.bank:,}",
                f"{cost.queries:,}",
                f"{cost.seconds:.2f}",
                f"{resident:.2f}",
                NONE if on_device is None else f"{on_device:.2f}",
                f"{cost.accuracy:.2f}",
                wanted,
                cells.met(is_met),
            ]
        )
    return table(head, body)


def _mode(row: RowRecord) -> str:
    if "surrogate" in row.settings:
        return f"CIP-net {row.settings['surrogate']}"
    climb = row.settings.get("climb")
    steps = f", steps {climb[0]:g} and {climb[1]:g}" if climb else ""
    return "one map" if row.potential is not None else f"{row.settings['mode']}{steps}"
