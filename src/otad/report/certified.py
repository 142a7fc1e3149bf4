"""What is proved, by which rules, under which assumptions."""

from __future__ import annotations

import statistics

from otad.evaluate.records import CertificateRecord, Evaluation
from otad.report.blocks import Block, Items, Picture, Section, Table, Text
from otad.report.certificate_plots import radii_plots
from otad.report.cost import duration
from otad.report.formatting import distance, percent
from otad.report.pictures import plot_uri


def certificate_section(evaluation: Evaluation) -> Section:
    certificate = evaluation.certificate
    if certificate is None:
        reason = evaluation.missing.get("certificate", "no certificate was computed")
        return Section("certificate", "What is proved", f"Nothing: {reason}.", [])
    blocks: list[Block] = []
    if evaluation.task == "classification":
        blocks += _radii(evaluation, certificate)
        proved = evaluation.certified_accuracy(evaluation.headline_eps)
        share = "-" if proved is None else percent(proved)
        lead = (
            f"{share} of the examples are right and stay so at any distance up to "
            f"{evaluation.headline_eps:g}, whatever the attack."
        )
    else:
        blocks += _bounds(evaluation, certificate)
        lead = (
            f"No input within {evaluation.headline_eps:g} of an example errs more than its bound."
        )
    if certificate.assumptions:
        blocks.append(Items("The proof rests on", certificate.assumptions))
    blocks.append(Text(f"All certificates took {duration(certificate.seconds)}."))
    return Section("certificate", "What is proved", lead, blocks)


def _radii(evaluation: Evaluation, certificate: CertificateRecord) -> list[Block]:
    rows = []
    for rule, radii in _by_rule(certificate.rules, certificate.radius).items():
        cells = distance(statistics.median(radii)), distance(max(radii))
        rows.append((rule, f"{len(radii):,}", *cells))
    found = evaluation.distances()
    inside = sum(0 < d < r for d, r in zip(found, certificate.radius, strict=True))
    verdict = "No adversarial example was found inside a certified radius."
    if inside:
        verdict = f"{inside} adversarial examples lie INSIDE a certified radius: a proof is wrong."
    return [
        Picture(
            plot_uri(radii_plots(evaluation)),
            "histogram of the certified radii, and for each example its certified radius below "
            "the distance of the nearest adversarial example found",
            "Left: the radii of the examples answered right. Right: each of them, sorted; the "
            "distance to its nearest wrong input lies somewhere on its gray line, between the "
            "radius proved (green) and the nearest adversarial example found (red); no red dot: "
            f"none was found. {verdict}",
        ),
        Table(("rule", "examples", "median radius", "largest"), rows),
    ]


def _bounds(evaluation: Evaluation, certificate: CertificateRecord) -> list[Block]:
    found = evaluation.worst_errors()
    rows = [
        (name, f"{statistics.fmean(it):.4g}", f"{statistics.median(it):.4g}", f"{max(it):.4g}")
        for name, it in (
            ("error unattacked", evaluation.clean_errors),
            ("largest error found", found),
            ("bound that is proved", certificate.worst_errors),
        )
    ]
    rules = ", ".join(_by_rule(certificate.rules, certificate.worst_errors))
    note = f"Rules: {rules}." if rules else ""
    return [Table(("", "mean", "median", "largest"), rows, note=note)]


def _by_rule(rules: tuple[str, ...], values: tuple[float, ...]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for rule, value in zip(rules, values, strict=False):
        found.setdefault(rule, []).append(value)
    return found
